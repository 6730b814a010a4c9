"""A shard: the safetensors file that holds a rank's pieces, written as a stream, read by intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.files import FileSystem, write_file
from shoal.checkpoint.manifest import FileRecord, StoredPiece, TensorRecord
from shoal.checkpoint.piece import Piece
from shoal.errors import CheckpointError

__all__ = ["describe", "read_interval", "write_shard"]

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


def describe(file: str, pieces: Sequence[Piece]) -> dict[str, TensorRecord]:
    """What the manifest says of a rank's pieces, once they are in `file`.

    An empty piece is not stored; its tensor is recorded all the same, so that a tensor without elements is.

    Raises:
        CheckpointError: Two pieces of a tensor differ in dtype or shape, or a dtype cannot be stored.
    """
    records: dict[str, TensorRecord] = {}
    for piece in pieces:
        stored = (StoredPiece(file, piece.start, piece.stop),) if piece.start < piece.stop else ()
        record = TensorRecord(_dtype_name(piece), piece.shape, stored)
        before = records.setdefault(piece.name, TensorRecord(record.dtype, record.shape, ()))
        if (before.dtype, before.shape) != (record.dtype, record.shape):
            raise CheckpointError(f"two pieces of {piece.name!r} differ in dtype or shape")
        records[piece.name] = TensorRecord(record.dtype, record.shape, before.pieces + stored)
    return records


def write_shard(path: Path, pieces: Sequence[Piece], files: FileSystem) -> FileRecord:
    """Writes the pieces to a safetensors file, and waits until it is on the disk.

    Tensors are written from where they are, one at a time; those on a device are copied one at a time. The
    format is a little-endian 64-bit length, that many bytes of JSON, and the tensors end to end.

    Args:
        path: The file.
        pieces: What it shall hold; empty ones are left out.
        files: Where it is written.

    Raises:
        CheckpointError: Two pieces would have the same key, or a dtype cannot be stored.
        OSError: The disk is full, or fails otherwise.
    """
    # Wide elements first: then each tensor starts at a multiple of its element size, and a reader can map it.
    ordered = sorted(
        (piece for piece in pieces if piece.start < piece.stop),
        key=lambda piece: (-piece.tensor.element_size(), piece.name, piece.start),
    )
    header = _header(ordered)

    def blocks() -> Iterator[memoryview]:
        yield memoryview(len(header).to_bytes(8, "little"))
        yield memoryview(header)
        for piece in ordered:
            flat = piece.tensor.detach().cpu().reshape(-1)
            yield flat.view(torch.uint8).numpy().data

    return FileRecord(*write_file(path, blocks(), files))


def read_interval(opened: Any, key: str, start: int, stop: int) -> torch.Tensor:
    """Reads the elements [start, stop) of the flattened tensor `key`, and little else.

    Rows are read whole, where a row is what one index of the first dim longer than 1 selects.

    Args:
        opened: What `safetensors.safe_open` gave.
        key: The tensor within the file.
        start: The first element wanted.
        stop: One past the last.

    Returns:
        A flat tensor of `stop - start` elements.
    """
    view = opened.get_slice(key)
    shape = view.get_shape()
    dim = next((dim for dim, length in enumerate(shape) if length > 1), None)
    if dim is None:
        return opened.get_tensor(key).reshape(-1)  # type: ignore[no-any-return]
    row = math.prod(shape[dim + 1 :])
    first, last = start // row, -(-stop // row)
    rows = view[(slice(None),) * dim + (slice(first, last),)].reshape(-1)
    return rows[start - first * row : stop - first * row]  # type: ignore[no-any-return]


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, dict[str, object]] = {}
    offset = 0
    for piece in pieces:
        key = StoredPiece("", piece.start, piece.stop).key(piece.name, piece.shape)
        if key in entries:
            raise CheckpointError(f"this rank holds piece {key!r} twice")
        if key == "__metadata__":
            raise CheckpointError(f"a tensor cannot be called {key!r}: safetensors reserves that name")
        whole = key == piece.name
        end = offset + piece.tensor.numel() * piece.tensor.element_size()
        entries[key] = {
            "dtype": _dtype_name(piece),
            "shape": piece.shape if whole else (piece.stop - piece.start,),
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _dtype_name(piece: Piece) -> str:
    name = _DTYPES.get(piece.tensor.dtype)
    if name is None:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
        raise CheckpointError(
            f"tensor {piece.name!r} is {piece.tensor.dtype}, which cannot be stored; stored are: {known}"
        )
    return name
