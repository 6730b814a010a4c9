"""Tensors in memory that other processes of the host can map, so that they travel without a copy."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence

import torch

from shoal.collectives.core import load_core


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
