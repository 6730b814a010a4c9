"""Buffers for moves to and from files, whose memory is used again.

New memory costs more processor time than a move: the system finds and clears each page at its first touch. So
the pool keeps the memory of a buffer, and gives it to the next one of equal size, once no tensor sees it any
more; tensors may be views, and may end in any thread. `clear` gives all memory back that is not in use.
"""

from __future__ import annotations

import weakref
from typing import final

import torch

from shoal.parallel.offload.state_file import aligned_buffer


@final
class BufferPool:
    """Memory of buffers, by size."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer as `aligned_buffer` does, of bytes, for at least so many."""
        kept = self._free.get(nbytes)
        memory = kept.pop() if kept else aligned_buffer(nbytes, torch.uint8)
        seen = memory.numpy()[:]  # what tensors refer to; `memory` itself has no other user
        weakref.finalize(seen, self._give_back, nbytes, memory).atexit = False
        return torch.from_numpy(seen)

    def clear(self) -> None:
        """Forget the memory that no tensor uses."""
        self._free.clear()

    def _give_back(self, nbytes: int, memory: torch.Tensor) -> None:
        self._free.setdefault(nbytes, []).append(memory)
