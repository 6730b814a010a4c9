"""Copies of pieces in host memory, so that training can go on while they are written."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import final

import torch

from shoal.checkpoint.files import ALIGNMENT
from shoal.checkpoint.region import Piece
from shoal.checkpoint.shard import in_order
from shoal.collectives.host_buffers import HostPages
from shoal.collectives.thread_device import on_callers_device

_SPARE, _LEAST = (
    0.02,
    1 << 20,
)  # share and bytes of memory beyond what is asked for: a later copy may need more


@final
class Staging:
    """Host memory for one copy of a rank's pieces, kept and used again by the next copy.

    Pieces lie in it as in their file, so that it is written from there.

    It is one block of memory in large pages. It is page-locked if a piece is on a GPU, so that copies from
    there run at the rate of the link. To touch and lock the memory of a large state takes seconds: a thread
    does it while training goes on. It alone uses the memory until it ends, for which a copy waits.
    """

    def __init__(self) -> None:
        self._pages: HostPages | None = None
        self._is_for_gpu = False
        self._is_touched = False
        self._was_locked = False  # or CUDA has refused
        self._refusal = ""
        self._preparing: threading.Thread | None = None

    def missing(self, pieces: Iterable[Piece]) -> int:
        """Return the bytes of new memory that a copy of `pieces` needs."""
        there = 0 if self._pages is None else self._pages.tensor.nbytes
        return max(0, _size(pieces) - there)

    def has_room(self, pieces: Iterable[Piece]) -> bool:
        """Return whether there is memory already for a copy of `pieces`."""
        return self._pages is not None and not self.missing(pieces)

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Make room for a copy of `pieces`.

        Raises:
            MemoryError: The system has not enough memory.
        """
        if self._pages is None or self.missing(pieces):
            self.release()
            self._pages = HostPages(round(_size(pieces) * (1 + _SPARE)) + _LEAST)
        self._is_for_gpu = self._is_for_gpu or any(piece.tensor.is_cuda for piece in pieces)

    def prepare(self) -> None:
        """Let a thread touch the memory, which the system gives at the first touch, and lock it for a GPU."""
        self._wait()
        if self._pages is not None:
            work = on_callers_device(self._touch_and_lock)
            self._preparing = threading.Thread(
                target=work, args=(self._pages,), name="shoal touch", daemon=True
            )
            self._preparing.start()

    def release(self) -> None:
        """Give the memory back; no copy is in use any more."""
        self._wait()
        self._pages = None
        self._is_for_gpu = self._is_touched = self._was_locked = False

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return copies of `pieces` in the memory that was reserved for them, once they are there."""
        assert self._pages is not None, "memory was reserved"
        self._wait()
        if self._is_for_gpu and not self._was_locked:  # nobody prepared for it
            self.prepare()
            self._wait()
        copies = [piece for piece in pieces if piece.start == piece.stop]
        for piece, offset in _places(pieces):
            place = self._pages.tensor[offset : offset + piece.tensor.nbytes].view(piece.tensor.dtype)
            place.copy_(piece.tensor.detach().view(-1), non_blocking=True)
            copies.append(replace(piece, tensor=place))
        self._is_touched = True
        for device in {piece.tensor.device for piece in pieces if piece.tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _touch_and_lock(self, pages: HostPages) -> None:
        if not self._is_touched:
            pages.tensor.zero_()
            self._is_touched = True
        if self._is_for_gpu and not self._was_locked:
            self._refusal = pages.lock()
            self._was_locked = True

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if self._refusal:
            # Copies are then slower, and right.
            warnings.warn(self._refusal, stacklevel=4)
            self._refusal = ""


def _places(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces with their places in memory: those of a file follow each other as they do there."""
    offset = 0
    held = list(pieces)
    for is_constant in (False, True):
        for piece in in_order(each for each in held if each.is_constant is is_constant):
            yield piece, offset
            offset += piece.tensor.nbytes
        offset = -(-offset // ALIGNMENT) * ALIGNMENT


def _size(pieces: Iterable[Piece]) -> int:
    return max((offset + piece.tensor.nbytes for piece, offset in _places(pieces)), default=0)
