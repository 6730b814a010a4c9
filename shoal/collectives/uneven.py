"""All-gather and reduce-scatter of parts of different sizes, as one broadcast or reduce for each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from shoal.collectives.checks import require_size
from shoal.collectives.operands import require_dense, require_places
from shoal.collectives.work import Several

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
