"""Tensors in memory that the other processes of the host can map: communicated without a copy."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence

import torch

from shoal.collectives.core import load_core

__all__ = ["empty", "trim"]


def empty(*shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose content is not defined, in shared memory; in ordinary memory without the native core.

    The ranks of a host read and write each other's tensors of this kind directly, and views of them too.
    What a process that was forked off writes to one stays with it.

    Args:
        shape: As for `torch.empty`.
        dtype: Of the elements.

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
    # The tensor keeps `memory`; with the last view of it the buffer goes back.
    weakref.finalize(memory, core.buffer_release, address).atexit = False
    return torch.frombuffer(memory, dtype=dtype, count=count).view(sizes)


def trim() -> int:
    """Gives the memory of freed shared tensors, which is kept for the next ones, back to the system.

    Returns:
        Bytes of memory that were given back; 0 without the native core.
    """
    core = load_core()
    return core.check(core.buffer_trim(), "giving shared memory back") if core is not None else 0
