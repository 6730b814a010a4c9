"""Several collectives that c10d calls as one. All are checked before the first begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.collectives.checks import require_list, require_pairs, require_parts, require_type
from shoal.collectives.codes import reduction_numbers
from shoal.collectives.work import Several

Tensors = Sequence[torch.Tensor]


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
