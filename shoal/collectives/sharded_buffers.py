"""FSDP2's communication buffers in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.collectives.buffers import empty
from shoal.errors import ModelError

# Torch 2.13 renamed these, and warns of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def share_buffers(module: nn.Module) -> None:
    """Make FSDP2 gather parameters and reduce gradients in memory that the ranks of a host share.

    Peers then read the buffers in place, and a buffer's pages stay from step to step. The tensors that FSDP2
    copies from and to the buffers stay in ordinary memory; `keep_freed_memory` keeps their pages.

    Args:
        module: A module that `fully_shard` was applied to. Modules inside it with `fully_shard` are included.

    Raises:
        ModelError: `fully_shard` was applied to none of them.
    """
    from torch.distributed.fsdp import FSDPModule  # a slow import, and this module is imported with torch

    sharded = [each for each in module.modules() if isinstance(each, FSDPModule)]
    if not sharded:
        raise ModelError(
            f"nothing in {type(module).__name__} is sharded by FSDP2",
            possible="a module to which torch.distributed.fsdp.fully_shard was applied",
            change="apply fully_shard first",
        )
    gather: Any = _AllGather()
    scatter: Any = _ReduceScatter()
    for each in sharded:
        each.set_custom_all_gather(gather)
        each.set_custom_reduce_scatter(scatter)


class _SharedMemory:
    """Allocates FSDP2's buffers in shared memory, with the interface of its `Comm`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return (
            empty(*size, dtype=dtype)
            if device.type == "cpu"
            else torch.empty(*size, dtype=dtype, device=device)
        )


class _AllGather(_SharedMemory):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_SharedMemory):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
