"""Memory that tensors free: kept by the C library for the next ones, or given back to the system."""

from __future__ import annotations

import ctypes
import mmap

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
