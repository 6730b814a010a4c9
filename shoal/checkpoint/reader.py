"""Reads parts of the tensors of a safetensors file."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import torch
from safetensors import safe_open

from shoal.limits import open_regular, strict_json_of

_CHUNK_BYTES = 1 << 20  # bytes that are read by one request and then hashed, while the next are read
_CHUNKS_AHEAD = 4  # chunks that are read before their hash is known, which bounds what is in memory
_LONGEST_HEADER = 100_000_000  # bytes: the limit of the format


class _Place(NamedTuple):
    """The bytes [start, stop) of a tensor in a file."""

    start: int
    stop: int


@final
class ShardReader:
    """A safetensors file that is open for reading.

    What is consecutive in the file is read in one request, which is quicker than to touch a mapped file's
    pages. Several threads were slower: the system reads ahead for one.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapping: Any = None
        with ExitStack() as opened:
            self._file = opened.enter_context(open_regular(path))
            self._places = self._read_header()
            self._open = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def start(self, key: str) -> int:
        """Return the first byte of a tensor in the file.

        Raises:
            ValueError: The file has no such tensor.
        """
        if key not in self._places:
            raise ValueError(f"it has no tensor {key!r}")
        return self._places[key].start

    def read(self, key: str, first: int, target: torch.Tensor) -> None:
        """Read consecutive elements of a tensor.

        Args:
            key: Name of the tensor in the file.
            first: The first element to read.
            target: The tensor to fill, contiguous, on the CPU, of the dtype in the file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file has no such elements.
        """
        offset, memory = self.locate(key, first, target)
        self.read_bytes(offset, memory)

    def settle(self) -> None:
        """Return when the targets of all reads may change: at once."""

    def locate(self, key: str, first: int, target: torch.Tensor) -> tuple[int, memoryview]:
        """Return where elements of a tensor begin in the file, and the bytes of the tensor to read them into.

        Args:
            key, first, target: See `read`.

        Raises:
            ValueError: The file has no such elements.
        """
        offset = self.start(key) + first * target.element_size()
        if first < 0 or offset + target.nbytes > self._places[key].stop:
            raise ValueError(f"it has no elements [{first}, {first + target.numel()}) of {key!r}")
        return offset, target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data

    def read_bytes(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from `offset` on; errors as in `read`."""
        while memory:
            count = os.preadv(self._file.fileno(), [memory], offset)
            if count == 0:
                raise ValueError("it ends too early")
            memory, offset = memory[count:], offset + count

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._file.fileno()).st_size

    def mapped(self, key: str) -> torch.Tensor:
        """Return a whole tensor, mapped from the file: the pages that are touched are read.

        Raises:
            safetensors.SafetensorError: The file has no such tensor.
        """
        if self._mapping is None:
            self._mapping = self._open.enter_context(safe_open(self._path, framework="pt"))
        tensor: torch.Tensor = self._mapping.get_tensor(key)
        return tensor

    def _read_header(self) -> Mapping[str, _Place]:
        length = int.from_bytes(self._file.read(8), "little")
        if length > min(_LONGEST_HEADER, self.size):
            raise ValueError("its header is too long")
        return dict(_places(strict_json_of(self._file.read(length)), 8 + length, self.size))


@final
class HashedPass:
    """One pass over a file that is open, from its beginning to its end; a thread hashes all of it.

    Tensors are read into their places on the way. `digest` reads what is left.

    Args:
        reader: The file.
    """

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._at = 0
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "shoal hash")
        self._pending: deque[Future[None]] = deque()
        scratch = memoryview(bytearray((_CHUNKS_AHEAD + 2) * _CHUNK_BYTES))
        parts = [scratch[begin : begin + _CHUNK_BYTES] for begin in range(0, len(scratch), _CHUNK_BYTES)]
        self._scratch = itertools.cycle(parts)  # a part is hashed before its turn comes again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def read(self, key: str, first: int, target: torch.Tensor) -> None:
        """Read elements as `ShardReader.read` does; what lies before the end of the last ones is read again.

        The target must not change before `settle` or `digest` returns.
        """
        offset, memory = self._reader.locate(key, first, target)
        if offset < self._at:
            self._reader.read_bytes(offset, memory)
            return
        self._pass_over(offset)
        for begin in range(0, len(memory), _CHUNK_BYTES):
            self._take(memory[begin : begin + _CHUNK_BYTES])

    def settle(self) -> None:
        """Return when all that was read is hashed, so that the targets may change."""
        self._wait_until(0)

    def digest(self) -> str:
        """Return the SHA-256 of the file, in hexadecimal; errors as in `ShardReader.read`."""
        self._pass_over(self._reader.size)
        self.settle()
        return self._hash.hexdigest()

    def _pass_over(self, offset: int) -> None:
        """Read and hash what nobody wants, up to `offset`."""
        while self._at < offset:
            self._take(next(self._scratch)[: offset - self._at])

    def _take(self, memory: memoryview) -> None:
        self._reader.read_bytes(self._at, memory)
        self._at += len(memory)
        self._pending.append(self._thread.submit(self._hash.update, memory))
        self._wait_until(_CHUNKS_AHEAD)

    def _wait_until(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.popleft().result()


def _places(header: Any, begin: int, size: int) -> Iterator[tuple[str, _Place]]:
    """Yield the place of each tensor in a file of `size` bytes, whose header ends at `begin`."""
    try:
        for key, entry in header.items():
            if key != "__metadata__":
                start, stop = entry["data_offsets"]
                if not (type(start) is type(stop) is int and 0 <= start <= stop <= size - begin):
                    raise ValueError(f"its header places {key!r:.80} at {start!r:.40} to {stop!r:.40}")
                yield key, _Place(begin + start, begin + stop)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its header is not one of safetensors: {error!r}") from error
