"""Copies of pieces in host memory, so that training can go on while they are written."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import final

import torch

from shoal.checkpoint.chunks import ALIGNMENT
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.shard import in_order

__all__ = ["Staging"]

_SPARE, _LEAST = (
    0.02,
    1 << 20,
)  # share and bytes of memory beyond what is asked for: a later copy may need more


@final
class Staging:
    """Host memory for one copy of a rank's pieces, kept and used again by the next copy.

    Pieces lie in it as in their file, so that it is written from there.

    It is one block of memory in large pages. It is pinned if a piece is on a GPU, so that copies from there
    run at the rate of the link.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._is_pinned = False
        self._touching: threading.Thread | None = None

    def missing(self, pieces: Iterable[Piece]) -> int:
        """Return the bytes of new memory that a copy of `pieces` needs."""
        held = 0 if self._memory is None else self._memory.nbytes
        return max(0, _size(pieces) - held)

    def has_room(self, pieces: Iterable[Piece]) -> bool:
        """Return whether there is memory already for a copy of `pieces`."""
        return self._memory is not None and not self.missing(pieces)

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Make room for a copy of `pieces`.

        Raises:
            MemoryError: The system has not enough memory.
        """
        if self._memory is None or self.missing(pieces):
            self.release()
            size = round(_size(pieces) * (1 + _SPARE)) + _LEAST
            try:
                block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"{size} bytes: {error.strerror}") from error
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(block, dtype=torch.uint8)
        if not self._is_pinned and any(piece.tensor.is_cuda for piece in pieces):
            # Without pinned memory, where the system refuses it, copies are slower and right.
            code = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
            self._is_pinned = int(code) == 0

    def touch(self) -> None:
        """Let a thread touch the memory: the system gives it at the first touch, which takes long."""
        if self._memory is not None:
            self._touching = threading.Thread(target=self._memory.zero_, name="shoal touch", daemon=True)
            self._touching.start()

    def release(self) -> None:
        """Give the memory back; no copy is in use any more."""
        self._wait()
        if self._is_pinned and self._memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._is_pinned = None, False

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return copies of `pieces` in the memory that was reserved for them, once they are there."""
        assert self._memory is not None, "memory was reserved"
        self._wait()
        copies = [piece for piece in pieces if piece.start == piece.stop]
        for piece, offset in _places(pieces):
            held = self._memory[offset : offset + piece.tensor.nbytes].view(piece.tensor.dtype)
            held.copy_(piece.tensor.detach().view(-1), non_blocking=True)
            copies.append(replace(piece, tensor=held))
        for device in {piece.tensor.device for piece in pieces if piece.tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _wait(self) -> None:
        if self._touching is not None:
            self._touching.join()
            self._touching = None


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
