"""One buffer of each rank on the device that all ranks share, mapped by all of them."""

from __future__ import annotations

import torch

from shoal.collectives.device_memory import DeviceMemory
from shoal.collectives.meetings import Meetings

_SMALLEST = 1 << 20  # bytes


class SharedMemory:
    """The buffers of a group. They grow, on all ranks at once, and are never larger than the limit.

    A rank's buffer is its own: torch keeps it until the last rank that mapped it has let go of it.

    Args:
        memory: Makes memory that other ranks can map.
        meetings: The messages of the group.
        rank: This rank.
        size: Number of ranks in the group.
        limit: Largest number of bytes of a buffer.
    """

    def __init__(self, memory: DeviceMemory, meetings: Meetings, rank: int, size: int, limit: int) -> None:
        self._limit = limit
        self.buffers: list[torch.Tensor] = []
        self.failure: Exception | None = None
        self._memory = memory
        self._meetings = meetings
        self._rank = rank
        self._size = size

    @property
    def capacity(self) -> int:
        """Bytes of each buffer; 0 before the first."""
        return self.buffers[self._rank].numel() if self.buffers else 0

    def can_grow_for(self, nbytes: int) -> bool:
        """Return whether the buffers are too small for `nbytes`, and below the limit; equal on all ranks."""
        return self.capacity < min(nbytes, self._limit)

    def reserve(self, nbytes: int, device: torch.device, seconds: float) -> None:
        """Let the buffers have `nbytes`, or the limit; all ranks call it, and none uses a buffer meanwhile.

        If a rank cannot have or map larger ones, all keep what they have, and that is their limit.

        Raises:
            CollectiveError: A rank does not come in time, or is lost.
        """
        larger = self._map(min(max(_SMALLEST, 1 << (nbytes - 1).bit_length()), self._limit), device, seconds)
        self._meetings.tell([larger is not None])
        heard = self._meetings.hear(1, seconds)
        if larger is not None and all(told == [True] for told in heard.values()):
            self.buffers = larger
        else:
            self._limit = self.capacity

    def _map(self, nbytes: int, device: torch.device, seconds: float) -> list[torch.Tensor] | None:
        """Return new buffers of all ranks; None if this rank cannot make its own, or map one."""
        exports = [b""] * self._size
        try:
            own = self._memory.empty(nbytes, device)
            exports = [b"" if rank == self._rank else self._memory.export(own) for rank in range(self._size)]
        except Exception as failure:
            self.failure = failure
        exported = self._meetings.exchange(exports, seconds)
        try:
            return [
                own if rank == self._rank else self._memory.open(exported[rank]) for rank in range(self._size)
            ]
        except Exception as failure:
            self.failure = self.failure or failure
            return None

    def close(self) -> None:
        """Let go of the buffers."""
        self.buffers = []
