"""A shard: a safetensors file that holds pieces of one rank, written as a stream."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import torch
from safetensors import safe_open

from shoal.checkpoint.files import ALIGNMENT, Chunks, FileSystem, digest_of, write_file
from shoal.checkpoint.manifest import FileRecord, StoredPiece, TensorRecord
from shoal.checkpoint.region import Piece
from shoal.collectives.host_buffers import BounceBuffers
from shoal.errors import CheckpointError
from shoal.limits import open_regular, strict_json_of

_LARGE = 1 << 20  # bytes
_PART = 2 << 20
"""Bytes of a part of a tensor on a device: less than a chunk, so that it is copied before the next one."""

_DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.uint8: "U8",
}
"""Names of the safetensors format: https://huggingface.co/docs/safetensors."""


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that a manifest names.

    Raises:
        CheckpointError: There is no such dtype.
    """
    for dtype, called in _DTYPES.items():
        if called == name:
            return dtype
    raise CheckpointError(
        f"the checkpoint has a tensor of type {name!r}, which this version cannot read; possible types: "
        f"{', '.join(sorted(_DTYPES.values()))}"
    )


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return the name of a dtype in the safetensors format.

    Args:
        dtype: The dtype.
        tensor: Name of the tensor, for the error.

    Raises:
        CheckpointError: It has none.
    """
    name = _DTYPES.get(dtype)
    if name is None:
        known = ", ".join(sorted(str(each).removeprefix("torch.") for each in _DTYPES))
        raise CheckpointError(
            f"tensor {tensor!r} is {dtype}, which cannot be stored; possible types: {known}"
        )
    return name


def describe(placed: Iterable[tuple[str, Piece]]) -> dict[str, TensorRecord]:
    """Return the manifest's records of a rank's pieces, each given with the file that stores it.

    An empty piece is not stored, but its tensor is recorded, so that a tensor without elements has a record.

    Raises:
        CheckpointError: Two pieces of a tensor differ in dtype or shape, or a dtype cannot be stored.
    """
    records: dict[str, TensorRecord] = {}
    for file, piece in placed:
        stored = (_stored(file, piece),) if piece.start < piece.stop else ()
        record = TensorRecord(dtype_name(piece.tensor.dtype, piece.name), piece.shape, stored)
        before = records.setdefault(piece.name, TensorRecord(record.dtype, record.shape, ()))
        if (before.dtype, before.shape) != (record.dtype, record.shape):
            raise CheckpointError(f"two pieces of {piece.name!r} differ in dtype or shape")
        records[piece.name] = TensorRecord(record.dtype, record.shape, before.pieces + stored)
    return records


def own_values(piece: Piece) -> torch.Tensor:
    """Return a piece's own tensor."""
    return piece.tensor


Values = Callable[[Piece], torch.Tensor]
"""Gives the elements of a piece."""


@final
class Shard:
    """The safetensors file of some pieces: a little-endian 64-bit length, that many bytes of JSON, tensors.

    Tensors are written one at a time, without a copy; those on a device are copied in parts.

    Args:
        pieces: The pieces; empty ones are left out.
        values: Function that gives a piece's elements, contiguous, when they are needed; by default the
            piece's own tensor. With it, the pieces' tensors may be on the meta device. Those of at most two
            pieces are held at once.

    Attributes:
        pieces: The pieces that are stored, in the order of the file.
        size: Bytes of the file.

    Raises:
        CheckpointError: Two pieces would have the same key, or a dtype cannot be stored.
    """

    def __init__(self, pieces: Iterable[Piece], values: Values = own_values) -> None:
        self.pieces = in_order(pieces)
        self._values = values
        body = sum(piece.tensor.nbytes for piece in self.pieces)
        header = _header(self.pieces)
        # The tensors of a large file begin where they can be written from memory without a copy.
        start = _round_up(8 + len(header), ALIGNMENT if body >= _LARGE else 8)
        self._head = (start - 8).to_bytes(8, "little") + header.ljust(start - 8)
        self.size = start + body

    def record(self) -> FileRecord:
        """Return the record that the file has, without writing it."""
        return FileRecord(self.size, digest_of(self._blocks()))

    def write(self, path: Path, files: FileSystem, chunks: Chunks) -> FileRecord:
        """Write the file, and wait until it is on the disk.

        Args:
            path: The file.
            files: The FileSystem to write to.
            chunks: Memory, which no other file uses meanwhile.

        Raises:
            OSError: The disk is full, or fails otherwise.
        """
        return FileRecord(*write_file(path, self._blocks(), files, chunks))

    def _blocks(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        pending: torch.Tensor | None = None
        with BounceBuffers(_PART) as buffers:
            for piece in self.pieces:
                tensor = self._values(piece).detach()
                if buffers.is_on_device(tensor):
                    if pending is not None:
                        yield pending.numpy().data
                        pending = None
                    yield from (part.view(torch.uint8).numpy().data for part in buffers.parts(tensor))
                    continue
                # A contiguous tensor of one element may have any stride, but a view of its bytes may not.
                tensor = tensor.cpu()
                flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                if pending is not None and not _is_next(pending, flat):
                    yield pending.numpy().data
                    pending = None
                pending = flat if pending is None else _joined(pending, flat)
        if pending is not None:
            yield pending.numpy().data


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces that are stored, in the order of a file.

    Wide elements come first: then each tensor starts at a multiple of its element size, and can be mapped.
    """
    return sorted(
        (piece for piece in pieces if piece.start < piece.stop),
        key=lambda piece: (-piece.tensor.element_size(), piece.name, piece.start),
    )


def _is_next(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor follow those of another in one block of memory."""
    is_one_block = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return is_one_block and one.data_ptr() + one.nbytes == other.data_ptr()


def _joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one.as_strided((one.nbytes + other.nbytes,), (1,))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _stored(file: str, piece: Piece) -> StoredPiece:
    """Return the stored piece; a region that is consecutive in its tensor is an interval of the tensor."""
    first = piece.block.first_element(piece.shape)
    if first is None:
        return StoredPiece(file, piece.start, piece.stop, piece.region)
    return StoredPiece(file, first + piece.start, first + piece.stop)


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, dict[str, object]] = {}
    offset = 0
    for piece in pieces:
        stored = _stored("", piece)
        key = stored.key(piece.name, piece.shape)
        if key in entries:
            raise CheckpointError(f"this rank holds piece {key!r} twice")
        if key == "__metadata__":
            raise CheckpointError(f"a tensor cannot be called {key!r}: safetensors reserves that name")
        end = offset + piece.tensor.numel() * piece.tensor.element_size()
        entries[key] = {
            "dtype": dtype_name(piece.tensor.dtype, piece.name),
            "shape": stored.shape_in_file(piece.shape),
            "data_offsets": (offset, end),
        }
        offset = end
    return json.dumps(entries, separators=(",", ":")).encode()


_ALIGNMENT = 64  # bytes, of the first tensor


def make_mapped_file(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Make a safetensors file of zeros, and return its tensors by name; a change of them changes the file.

    The system writes changed pages to the disk and takes their memory for others when it needs it, so that a
    file may be larger than memory. Its room on the disk is taken at once.

    Args:
        path: The file.
        tensors: Shape and dtype of each tensor, by name.
        metadata: Texts to keep in the file's header.

    Raises:
        OSError: The file exists, cannot be made, or has no room.
        CheckpointError: A dtype cannot be stored.
    """
    # Wide types first, so that each tensor begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    begins, size = {}, 0
    for name in names:
        shape, dtype = tensors[name]
        begins[name], size = size, size + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": dtype_name(dtype, name),
            "shape": shape,
            "data_offsets": (begins[name], size),
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    start = -(-(8 + len(header)) // _ALIGNMENT) * _ALIGNMENT
    with path.open("x+b") as file:
        file.write((start - 8).to_bytes(8, "little") + header.ljust(start - 8))
        file.flush()
        os.posix_fallocate(file.fileno(), 0, start + size)
        mapping = mmap.mmap(file.fileno(), start + size)
    made = {}
    for name in names:
        shape, dtype = tensors[name]
        count = math.prod(shape)
        made[name] = (
            torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + begins[name]).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    return made


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
