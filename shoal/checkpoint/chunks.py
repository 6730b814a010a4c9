"""Cuts bytes into chunks that can be written past the system's cache."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator
from typing import final

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "CHUNKS_AHEAD", "Chunks"]

ALIGNMENT = 4096
"""Bytes of which places in memory and in a file are multiples where writing goes past the system's cache."""

CHUNKS_AHEAD = 3
"""Chunks that may be in use, beside the one that is made: this bounds what is in memory."""

_BYTES = 4 << 20  # of a chunk: requests of 2 MiB reached two thirds of the disk's rate


@final
class Chunks:
    """Cut blocks of bytes into aligned chunks, one file after the other.

    What is not aligned is copied. The memory for that is kept for the next file: new memory may come slowly
    from the system.
    """

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] | None = None

    def cut(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the same bytes in chunks that are aligned, all but the last one.

        A block that is aligned is cut. Others are copied to memory that is used again some chunks later.

        Args:
            blocks: Flat views of bytes.
        """
        if self._memory is None:
            self._memory = _new_memory((CHUNKS_AHEAD + 2) * _BYTES)
        free = itertools.cycle(self._memory.reshape(-1, _BYTES))
        chunk, filled = next(free), 0
        for block in blocks:
            source = np.frombuffer(block, np.uint8)
            if source.ctypes.data % ALIGNMENT == 0 and filled % ALIGNMENT == 0 and source.size >= _BYTES:
                if filled:
                    yield chunk[:filled].data
                    chunk, filled = next(free), 0
                while source.size >= _BYTES:
                    yield source[:_BYTES].data
                    source = source[_BYTES:]
            while source.size:
                count = min(source.size, _BYTES - filled)
                np.copyto(chunk[filled : filled + count], source[:count])  # lets other threads run
                source, filled = source[count:], filled + count
                if filled == _BYTES:
                    yield chunk.data
                    chunk, filled = next(free), 0
        if filled:
            yield chunk[:filled].data


def _new_memory(size: int) -> npt.NDArray[np.uint8]:
    """Return memory that is quick to write from: in large pages, beyond the chunk that small files take."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE, _BYTES)
    return np.frombuffer(block, np.uint8)
