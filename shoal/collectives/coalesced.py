"""Several collectives that c10d calls as one; all are checked before the first begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.collectives.checks import require_list, require_pairs, require_parts, require_type
from shoal.collectives.codes import reduction_numbers
from shoal.collectives.work import Several

__all__ = ["all_gather_lists", "all_gather_pairs", "reduce_scatter_pairs"]

Tensors = Sequence[torch.Tensor]


def all_gather_pairs(group: Any, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
    """Does `all_gather_single` for several pairs of tensors.

    Args:
        group: Of the backend "shoal".
        outputs: One for each input, for everybody's.
        inputs: This rank's.
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
    """Does `reduce_scatter_single` for several pairs of tensors.

    Args:
        group: Of the backend "shoal".
        outputs: One for each input, for this rank's part of the result.
        inputs: This rank's, whole.
        opts: c10d's ReduceScatterOptions.

    Raises:
        CollectiveError: A pair does not fit, or has no such reduction.
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
    """Does `allgather` for several tensors.

    Args:
        group: Of the backend "shoal".
        outputs: A list for every rank, of a tensor for every input.
        inputs: This rank's.
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
