"""FSDP2's communication buffers in shared memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.collectives.ctypes_core import load_core
from shoal.errors import ModelError

# Options of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_MAPPED, _TRIMMED = 1 << 20, 128 << 10  # bytes
_LARGEST_MMAP_THRESHOLDS = (1 << 30, 32 << 20)  # bytes; glibc before 2.35 accepts at most the second


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, in the whole process until it ends.

    glibc gives large blocks back to the system, which has to clear their pages when they are allocated again.
    FSDP2 frees and allocates every parameter in every step: for a model of 12.6 M parameters that makes
    14,000 to 22,000 page faults, a tenth of the step. Recompute does the same with a block's activations. The
    price: the process keeps the largest size that it ever had.

    Returns:
        Whether the C library can do so, as glibc can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_TRIM_THRESHOLD, _NEVER):
        return False
    return any(mallopt(_MMAP_THRESHOLD, nbytes) for nbytes in _LARGEST_MMAP_THRESHOLDS)


def return_freed_memory() -> bool:
    """Make the C library give back freed memory at once, in the whole process: undo `keep_freed_memory`.

    Tensors of 1 MiB or more then have pages of their own, and none lies between others. It is for processes
    that must stay below a limit.

    Returns:
        Whether the C library can do so.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _TRIMMED) and mallopt(_MMAP_THRESHOLD, _MAPPED))


def use_huge_pages(address: int, nbytes: int) -> None:
    """Let the system back memory that was not written yet by pages of 2 MiB, where it can.

    It then has to find and clear one such page in place of 512. Memory of less than a few MiB has none.

    Args:
        address: First byte.
        nbytes: Number of bytes.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if madvise is not None and advice is not None and address + nbytes > first:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), advice)


def empty(*shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an uninitialised tensor in shared memory; in ordinary memory without the native core.

    The ranks of a host read and write each other's tensors of this kind, and views of them, directly. When a
    forked process writes to such a tensor, only that process sees the change.

    Args:
        shape: Shape, in the forms that `torch.empty` takes.
        dtype: Type of the elements.

    Raises:
        CollectiveError: The system has no memory, or no descriptor, for it.
    """
    sizes = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)  # type: ignore[arg-type]
    count = math.prod(sizes)
    core = load_core()
    if core is None or count == 0:
        return torch.empty(sizes, dtype=dtype)
    nbytes = count * dtype.itemsize
    address = core.buffer_allocate(nbytes)
    if not address:
        raise core.failure("allocating shared memory")
    memory = (ctypes.c_byte * nbytes).from_address(address)
    # The tensor keeps `memory`; when its last view is freed, the buffer goes back.
    weakref.finalize(memory, core.buffer_release, address).atexit = False
    return torch.frombuffer(memory, dtype=dtype, count=count).view(sizes)


def trim() -> int:
    """Give back to the system the memory of freed shared tensors, which is kept for the next ones.

    Returns:
        Bytes of memory that were given back; 0 without the native core.
    """
    core = load_core()
    return core.check(core.buffer_trim(), "giving shared memory back") if core is not None else 0


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
