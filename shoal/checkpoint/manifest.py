"""The manifest: the contents of a checkpoint, their files, and hashes to verify them.

`manifest.json`, format 1, is one JSON object:

    format   1
    step     the optimizer step after which it was saved
    files    {file: {"size": bytes, "sha256": hexadecimal}}
    tensors  {name: {"dtype": "BF16", "shape": [...], "pieces": [{"file", "start", "stop"}, ...]}}
    state    the JSON object that the caller gave: position, plan, seeds
    sha256   of all of the above, as compact JSON with sorted keys

A piece is the elements [start, stop) of the tensor, flattened in row-major order. A piece of a block that is
not consecutive in the tensor has {"file", "region": {"offset": [...], "shape": [...]}, "interval": [start,
stop]} instead: the block's first index and its length along each dim, and the piece's elements in the block,
flattened. Files are named relative to the checkpoint's directory and must be in it: a manifest that names
another place is refused before any file is opened. A piece's key in the safetensors file follows from
these (`StoredPiece.key`) and is not stored: with many tensors, the pieces are most of the file. dtypes have
the names that safetensors gives them.

A reader ignores members that it does not know, so a later version may add some. Where an older reader would
misread the result, it leaves out `start`, as pieces of blocks do, without which such a reader refuses, or
raises `format`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.region import Region, check_coverage
from shoal.errors import CheckpointError, CorruptCheckpointError
from shoal.limits import DIMS, MANIFEST, is_inside, read_regular, strict_json_of

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_MOST = (1 << 63) - 1  # bytes or elements


@dataclass(frozen=True)
class FileRecord:
    """One file: its size in bytes and the SHA-256 of its content, in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class StoredPiece:
    """The elements [start, stop) of a flattened tensor, or of a region of it, and the file that holds them.

    Args:
        file: Name of the file within the checkpoint's directory.
        start: The first element, counted in the region.
        stop: One past the last element.
        region: A block of the tensor that is not consecutive in it; None: all of the tensor.
    """

    file: str
    start: int
    stop: int
    region: Region | None = None

    def block(self, shape: Sequence[int]) -> Region:
        """Return the region; without one, all of a tensor of `shape`."""
        return Region.whole(shape) if self.region is None else self.region

    def key(self, name: str, shape: Sequence[int]) -> str:
        """Return the key of the tensor `name` of `shape` in this piece's file.

        A whole tensor keeps its name and its shape, so that other readers of safetensors find what they
        expect; a part is one-dimensional and called "name[start:stop]". A region is called "name[a:b,c:d]" by
        its indices and keeps its shape; a part of one is called "name[a:b,c:d][start:stop]".
        """
        called = name if self.region is None else f"{name}{self.region}"
        return called if self._is_full(shape) else f"{called}[{self.start}:{self.stop}]"

    def shape_in_file(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that a tensor of `shape` has in this piece's file."""
        return self.block(shape).shape if self._is_full(shape) else (self.stop - self.start,)

    def _is_full(self, shape: Sequence[int]) -> bool:
        return self.start == 0 and self.stop == self.block(shape).elements


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: its dtype in safetensors' names, its global shape and where its elements are."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Args:
        step: The optimizer step after which it was saved.
        files: Records of files, by name within the checkpoint's directory.
        tensors: Records of tensors, by name.
        state: The state that the caller saves beside the tensors.
    """

    step: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    state: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files together, without the manifest."""
        return sum(file.size for file in self.files.values())

    def to_json(self) -> bytes:
        """Return the bytes of `manifest.json`.

        Raises:
            CheckpointError: `state` is not JSON.
        """
        body = {
            "format": _FORMAT,
            "step": self.step,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "pieces": [_piece_body(piece) for piece in tensor.pieces],
                }
                for name, tensor in self.tensors.items()
            },
        }
        try:
            # Read back before the hash: JSON turns keys that are numbers into text, which sorts differently.
            body["state"] = json.loads(json.dumps(dict(self.state), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state to save is not JSON: {error}") from error
        return _compact({"sha256": _digest(body), **body})

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read `manifest.json`.

        Raises:
            CorruptCheckpointError: The text is incomplete, altered, or of another format.
        """
        try:
            body = strict_json_of(text)
        except ValueError as error:
            raise CorruptCheckpointError(f"is not JSON: {error}") from error
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            found = body.get("format") if isinstance(body, dict) else None
            raise CorruptCheckpointError(f"has format {found!r}; this version reads format {_FORMAT}")
        try:
            is_whole = body.pop("sha256", None) == _digest(body)
        except (ValueError, RecursionError) as error:  # it was not written from such values
            raise CorruptCheckpointError(f"cannot have a hash: {error}") from error
        if not is_whole:
            raise CorruptCheckpointError("was changed after it was written: its sha256 differs")
        try:
            manifest = cls(
                step=_count(body["step"]),
                files={name: _file_record(file) for name, file in body["files"].items()},
                tensors={name: _tensor_record(tensor) for name, tensor in body["tensors"].items()},
                state=body["state"],
            )
            _require_inside(manifest)
            _check_coverage(manifest.tensors)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"does not follow format {_FORMAT}: {error!r}") from error
        except CheckpointError as error:
            raise CorruptCheckpointError(str(error)) from error
        return manifest


def merge(tensors: Iterable[Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Return the tensors of a checkpoint of which each rank wrote a part.

    Args:
        tensors: For each rank, the tensors of which it wrote pieces.

    Raises:
        CheckpointError: The ranks disagree on a dtype or a shape, or the pieces of a tensor have a gap or
            overlap; the message names the tensor.
    """
    merged: dict[str, tuple[TensorRecord, list[StoredPiece]]] = {}
    for rank, records in enumerate(tensors):
        for name, record in records.items():
            first, pieces = merged.setdefault(name, (record, []))
            if (record.dtype, record.shape) != (first.dtype, first.shape):
                raise CheckpointError(
                    f"tensor {name!r} is {record.dtype} {list(record.shape)} on rank {rank}, "
                    f"and {first.dtype} {list(first.shape)} on a rank before it"
                )
            pieces.extend(record.pieces)
    whole = {
        name: TensorRecord(first.dtype, first.shape, tuple(sorted(pieces, key=_place)))
        for name, (first, pieces) in merged.items()
    }
    _check_coverage(whole)
    return whole


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in the directory `path`, without its tensors.

    Raises:
        CorruptCheckpointError: The manifest is missing, incomplete, altered, of another format, or does not
            cover a tensor.
    """
    file = path / MANIFEST_NAME
    try:
        return Manifest.from_json(read_regular(file, MANIFEST))
    except ValueError as error:
        raise CorruptCheckpointError(f"{file} cannot be read: {error}") from error
    except OSError as error:
        raise CorruptCheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{file} {error}") from error


def _check_coverage(tensors: Mapping[str, TensorRecord]) -> None:
    """Check that the pieces of each tensor hold each of its elements exactly once.

    Raises:
        CheckpointError: They do not; the message names the tensor.
    """
    sound = set()  # tensors of one shape mostly have equal pieces; those of an optimizer always do
    for name, tensor in tensors.items():
        pieces = tuple((piece.block(tensor.shape), piece.start, piece.stop) for piece in tensor.pieces)
        if (tensor.shape, pieces) not in sound:
            check_coverage(name, tensor.shape, pieces)
            sound.add((tensor.shape, pieces))


def _require_inside(manifest: Manifest) -> None:
    """Refuse files that are not listed, or whose names lead out of the checkpoint's directory."""
    for name in manifest.files:
        if not is_inside(name):
            raise CorruptCheckpointError(
                f"names the file {name!r}: the files of a checkpoint must be in its own directory"
            )
    for tensor, record in manifest.tensors.items():
        for piece in record.pieces:
            if piece.file not in manifest.files:
                raise CorruptCheckpointError(
                    f"has a piece of tensor {tensor!r} in {piece.file!r}, which is not one of its files"
                )


def _file_record(body: Mapping[str, Any]) -> FileRecord:
    return FileRecord(_count(body["size"]), _text(body["sha256"]))


def _tensor_record(body: Mapping[str, Any]) -> TensorRecord:
    pieces = tuple(_stored_piece(piece) for piece in body["pieces"])
    shape = _counts(body["shape"])
    _count(math.prod(max(1, length) for length in shape))  # torch has no larger one, with elements or without
    return TensorRecord(_text(body["dtype"]), shape, pieces)


def _count(value: Any) -> int:
    """Return a number of bytes or elements, or a place among them."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise TypeError(f"{value!r} is no number from 0 to {_MOST}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > DIMS:
        raise TypeError(f"{values!r:.80} is no list of at most {DIMS} numbers")
    return tuple(map(_count, values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _stored_piece(body: Mapping[str, Any]) -> StoredPiece:
    if "region" not in body:
        return StoredPiece(_text(body["file"]), _count(body["start"]), _count(body["stop"]))
    region = Region(_counts(body["region"]["offset"]), _counts(body["region"]["shape"]))
    start, stop = _counts(body["interval"])
    return StoredPiece(_text(body["file"]), start, stop, region)


def _piece_body(piece: StoredPiece) -> dict[str, Any]:
    if piece.region is None:
        return {"file": piece.file, "start": piece.start, "stop": piece.stop}
    region = {"offset": list(piece.region.offset), "shape": list(piece.region.shape)}
    return {"file": piece.file, "region": region, "interval": [piece.start, piece.stop]}


def _place(piece: StoredPiece) -> tuple[tuple[int, ...], int]:
    return (() if piece.region is None else piece.region.offset), piece.start


def _compact(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_compact(body)).hexdigest()
