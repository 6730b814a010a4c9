"""Blocks of arrays that pass through memory: each is read ahead of its visit, and written behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar, final

import torch

from shoal.parallel.offload.state_file import Segment, aligned_buffer
from shoal.parallel.offload.storage import Storage
from shoal.plan import BUFFERS, GRANULE

_Of = TypeVar("_Of")
_Buffers = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block(Generic[_Of]):
    """A range of some arrays in files.

    Attributes:
        first: First element of the range; a multiple of GRANULE.
        elements: Number of elements.
        arrays: The arrays by name.
        changed: Names of the arrays that a visit changes.
        of: What the visitor wants to know of it.
    """

    first: int
    elements: int
    arrays: Mapping[str, Segment]
    changed: frozenset[str]
    of: _Of


@final
class Stream(Generic[_Of]):
    """Passes blocks through memory.

    Args:
        storage: Has the threads that move them.
        dtypes: The arrays that pass, by name, with the types of their elements.
        capacity: Elements of the largest block.
        pinned: Whether buffers are page-locked; they are then kept, as that takes long. Others are there
            during a visit alone.
    """

    def __init__(
        self, storage: Storage, dtypes: Mapping[str, torch.dtype], capacity: int, *, pinned: bool
    ) -> None:
        self._storage = storage
        self._dtypes = dtypes
        self._capacity = capacity
        self._pinned = pinned
        self._free: deque[_Buffers] = deque()

    def visit(self, blocks: Iterable[Block[_Of]], change: Callable[[_Of, _Buffers], None]) -> None:
        """Read each block, let `change` change it, and write what it changes; return once all is written.

        Args:
            blocks: The blocks; no two overlap.
            change: Called for each block in order, with its `of` and with buffers that begin with its arrays.

        Raises:
            OffloadError: A file could not be read or written.
        """
        coming = iter(blocks)
        while len(self._free) < BUFFERS:
            self._free.append(
                {
                    name: aligned_buffer(self._capacity, dtype, pinned=self._pinned)
                    for name, dtype in self._dtypes.items()
                }
            )
        reading: deque[tuple[Block[_Of], _Buffers, list[Future[None]]]] = deque()
        writing: deque[tuple[_Buffers, list[Future[None]]]] = deque()
        try:
            self._read_next(coming, reading, writing)
            while reading:
                self._read_next(coming, reading, writing)
                block, buffers, moves = reading[0]
                self._finish(moves, "read:block")
                change(block.of, buffers)
                writing.append((buffers, self._start(block, buffers, "write")))
                reading.popleft()
        finally:
            for _, buffers, moves in reading:
                writing.append((buffers, moves))
            while writing:
                self._take_back(writing)
            if not self._pinned:
                self._free.clear()

    def _read_next(
        self,
        coming: Iterator[Block[_Of]],
        reading: deque[tuple[Block[_Of], _Buffers, list[Future[None]]]],
        writing: deque[tuple[_Buffers, list[Future[None]]]],
    ) -> None:
        block = next(coming, None)
        if block is not None:
            if not self._free:
                self._take_back(writing)
            buffers = self._free.popleft()
            reading.append((block, buffers, self._start(block, buffers, "read")))

    def _take_back(self, writing: deque[tuple[_Buffers, list[Future[None]]]]) -> None:
        """Wait for the oldest write, and free its buffers."""
        buffers, moves = writing.popleft()
        self._free.append(buffers)
        self._finish(moves, "write:block")

    def _start(self, block: Block[_Of], buffers: _Buffers, action: str) -> list[Future[None]]:
        elements = -(-block.elements // GRANULE) * GRANULE
        return [
            self._storage.start(getattr(segment, action), block.first, buffers[name][:elements])
            for name, segment in block.arrays.items()
            if action == "read" or name in block.changed
        ]

    def _finish(self, moves: Iterable[Future[None]], name: str) -> None:
        for move in moves:
            self._storage.wait(move, name)
