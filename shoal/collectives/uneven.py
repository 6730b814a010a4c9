"""All-gather and reduce-scatter of parts of different sizes, as one broadcast or reduce for each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives.checks import (
    require_dense,
    require_list,
    require_pairs,
    require_parts,
    require_places,
    require_size,
    require_type,
)
from shoal.collectives.enums import described, reduction_numbers, refusal
from shoal.collectives.work import Done, Several

Tensors = Sequence[torch.Tensor]


def all_gather_uneven(
    group: dist.ProcessGroup, outputs: Tensors, tensor: torch.Tensor, opts: Any
) -> dist.Work:
    """Give every rank of the group the tensors of all ranks.

    Args:
        group: A group of the backend "shoal".
        outputs: One tensor for each rank.
        tensor: This rank's tensor.
        opts: c10d's options, for the timeout.
    """
    rank = group.rank()
    require_size(outputs[rank], tensor.numel(), "this rank's part of the output of all_gather")
    for output in outputs:
        require_places(output)
    outputs[rank].detach().copy_(tensor.reshape(outputs[rank].shape))
    rooted = c10d.BroadcastOptions()
    rooted.timeout = opts.timeout
    works = []
    for rooted.rootRank, output in enumerate(outputs):
        works.append(group.broadcast([output], rooted))
    return Several(works, [outputs])


def reduce_scatter_uneven(
    group: dist.ProcessGroup, output: torch.Tensor, parts: Tensors, opts: Any
) -> dist.Work:
    """Reduce a list of tensors over the group; rank i gets the i-th.

    Args:
        group: A group of the backend "shoal".
        output: This rank's result.
        parts: One tensor for each rank.
        opts: c10d's options, for the timeout and the reduction.
    """
    rank = group.rank()
    require_size(output, parts[rank].numel(), "the output of reduce_scatter")
    rooted = c10d.ReduceOptions()
    rooted.timeout, rooted.reduceOp = opts.timeout, opts.reduceOp
    require_dense(output)
    require_places(output)
    copies = [part.clone() for part in parts]
    works = []
    for rooted.rootRank, copy in enumerate(copies):
        works.append(group.reduce([copy], rooted))
    return Several(works, [output], lambda: output.detach().copy_(copies[rank].reshape(output.shape)))


def all_gather_pairs(group: Any, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
    """Do `all_gather_single` for several pairs of tensors.

    Args:
        group: A group of the backend "shoal".
        outputs: For each input, the tensor for the inputs of all ranks.
        inputs: This rank's tensors.
        opts: c10d's AllgatherOptions.

    Raises:
        CollectiveError: A pair does not fit.
    """
    what = "all_gather_single_coalesced"
    pairs = require_pairs(outputs, inputs, what)
    for output, tensor in pairs:
        require_type(output, tensor, what)
        require_parts(output, tensor, group.size(), what)
    works = [group.all_gather_single(output, tensor, opts) for output, tensor in pairs]
    return works[0] if len(works) == 1 else Several(works, outputs)


def reduce_scatter_pairs(group: Any, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
    """Do `reduce_scatter_single` for several pairs of tensors.

    Args:
        group: A group of the backend "shoal".
        outputs: For each input, the tensor for this rank's part of the result.
        inputs: This rank's whole tensors.
        opts: c10d's ReduceScatterOptions.

    Raises:
        CollectiveError: A pair does not fit, or its type does not have the reduction.
    """
    what = "reduce_scatter_single_coalesced"
    pairs = require_pairs(outputs, inputs, what)
    for output, tensor in pairs:
        require_type(output, tensor, what)
        require_parts(tensor, output, group.size(), what)
        reduction_numbers(opts.reduceOp, tensor.dtype)
    works = [group.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs]
    return works[0] if len(works) == 1 else Several(works, outputs)


def all_gather_lists(group: Any, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
    """Do `allgather` for several tensors.

    Args:
        group: A group of the backend "shoal".
        outputs: For each rank, a list with a tensor for every input.
        inputs: This rank's tensors.
        opts: c10d's AllgatherOptions.

    Raises:
        CollectiveError: A list does not fit.
    """
    what = "allgather_coalesced"
    for output, _ in require_pairs(outputs, range(group.size()), what):
        require_pairs(output, inputs, what)
    pairs = list(zip(zip(*outputs, strict=True), inputs, strict=True))
    for each, tensor in pairs:
        require_list(each, f"the output list of {what}", like=tensor, even=True)
    return Several([group.allgather([each], [tensor], opts) for each, tensor in pairs], outputs)


class Gathers(Protocol):
    """A group that can gather tensors, such as a `ProcessGroup`."""

    def size(self) -> int:
        """Number of ranks."""

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        """Give every rank the tensors of all ranks, one after the other in `output`."""


def all_reduce_sparse(group: Gathers, tensor: torch.Tensor, opts: Any) -> dist.Work:
    """Sum a sparse COO tensor over all ranks, in place; the sum is complete when it returns.

    The entries of all ranks are padded to the largest number that a rank has, gathered, and added where they
    have the same position.

    Args:
        group: The group of ranks.
        tensor: The sparse tensor, which has the same shape on all ranks.
        opts: c10d's AllreduceOptions.

    Raises:
        CollectiveError: The reduction is not a sum.
    """
    if opts.reduceOp != ReduceOp.SUM:
        raise refusal(
            f"{opts.reduceOp.op.name} was given for the sparse {described(tensor)}",
            possible="SUM",
            change="use SUM, or convert it with .to_dense()",
        )
    own = tensor.coalesce()
    counts = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(counts, torch.tensor([own._nnz()])).wait()
    most = int(counts.max())
    indices = _gather(group, own.indices().t().contiguous(), most)
    values = _gather(group, own.values(), most)
    present = torch.cat([torch.arange(most) < count for count in counts])
    summed = torch.sparse_coo_tensor(indices[present].t(), values[present], tensor.shape).coalesce()
    tensor.copy_(summed)
    return Done([tensor])


def _gather(group: Gathers, rows: torch.Tensor, most: int) -> torch.Tensor:
    """Return the rows of all ranks, each rank's padded to `most`."""
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(group.size() * most, *rows.shape[1:])
    group.all_gather_single(gathered, padded).wait()
    return gathered
