"""Memory of the host that a device copies from and to: page-locked, shared with other ranks, and reused."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import defaultdict
from dataclasses import dataclass

import torch

from shoal.collectives import (
    buffers,
)  # the module: it may be halfway through `import torch`, which imports this
from shoal.collectives.device_copies import Event
from shoal.collectives.page_lock import lock_pages

_SMALLEST = 1 << 16  # bytes; whole pages, which no other buffer shares
_MOST_IN_FLIGHT = 2
"""Free buffers of one size that copies to the device may still read, before a caller waits for the oldest."""


@dataclass(eq=False, slots=True)
class HostBuffer:
    """One buffer.

    Attributes:
        memory: Its bytes.
        reader: Event after which the device has copied its content; None if it copies nothing.
    """

    memory: torch.Tensor
    reader: Event | None = None


class HostBuffers:
    """Buffers of about the sizes that were asked for so far.

    Sizes are rounded up by at most an eighth: near ones share buffers, and locked pages are all in memory.

    Args:
        locks_pages: Whether pages are locked for CUDA, whose copies are slow and block the caller without.
    """

    def __init__(self, *, locks_pages: bool) -> None:
        self._locks_pages = locks_pages
        self._taking = threading.Lock()
        self._free: defaultdict[int, list[HostBuffer]] = defaultdict(list)

    def take(self, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, HostBuffer]:
        """Return memory `[elements]`, and its buffer, which is free again when nobody holds the memory."""
        nbytes = elements * dtype.itemsize
        size = _rounded(nbytes)
        with self._taking:
            buffer = self._unused(self._free[size]) or HostBuffer(self._new(size))
        lent = buffer.memory[:nbytes].view(dtype)
        weakref.finalize(lent, self._free[size].append, buffer).atexit = False
        return lent, buffer

    def _unused(self, free: list[HostBuffer]) -> HostBuffer | None:
        idle = [each for each in free if each.reader is None or each.reader.query()]
        if not idle and len(free) < _MOST_IN_FLIGHT:
            return None
        buffer = (idle or free)[0]
        free.remove(buffer)
        if buffer.reader is not None:
            buffer.reader.synchronize()
            buffer.reader = None
        return buffer

    def _new(self, size: int) -> torch.Tensor:
        memory = buffers.empty(size, dtype=torch.uint8)
        if self._locks_pages and (reason := lock_pages(memory, memory)):
            warnings.warn(reason, stacklevel=2)
        return memory


def _rounded(nbytes: int) -> int:
    """Return the size of the buffer for so many bytes: one of eight between two powers of two."""
    grain = max(_SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return max(1, -(-nbytes // grain)) * grain
