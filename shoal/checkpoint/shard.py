"""A shard: a safetensors file that holds pieces of one rank, written as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import final

import torch

from shoal.checkpoint.files import ALIGNMENT, Chunks, FileSystem, digest_of, write_file
from shoal.checkpoint.manifest import FileRecord, StoredPiece, TensorRecord
from shoal.checkpoint.region import Piece
from shoal.collectives.bounce_buffers import BounceBuffers
from shoal.errors import CheckpointError

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
