"""The sum of sparse tensors over ranks, which may have different numbers of entries."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives.refusal import described, refusal
from shoal.collectives.work import Done


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
