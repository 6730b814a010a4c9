"""Loads checkpoints: each rank reads the elements that it wants from the files that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shoal.checkpoint.coordinator import Coordinator, attempt_together
from shoal.checkpoint.manifest import Manifest, StoredPiece, read_manifest
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.reader import HashedPass, ShardReader
from shoal.checkpoint.region import Region, Run, overlaps
from shoal.checkpoint.shard import dtype_named
from shoal.collectives.bounce_buffers import BounceBuffers
from shoal.errors import CheckpointError, CorruptCheckpointError, nearest

__all__ = ["Copy", "copies_by_file", "fill", "in_order_of_file", "load", "opened", "perform"]


@dataclass(frozen=True)
class Copy:
    """A copy of a region of a tensor, from a stored piece into a wanted piece.

    Attributes:
        source: The stored piece.
        target: The wanted piece.
        source_run: The block that contains the region and is consecutive in the source.
        target_run: The block that contains the region and is consecutive in the target.
        region: The region that both hold.
        dtype: The source's dtype.
    """

    source: StoredPiece
    target: Piece
    source_run: Run
    target_run: Run
    region: Region
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Name of the source in its file."""
        return self.source.key(self.target.name, self.target.shape)

    @property
    def first(self) -> int | None:
        """The region's first element in the source; None if it is not consecutive there."""
        return self.source_run.first_of(self.region)

    @property
    def nbytes(self) -> int:
        """Bytes of the region in the file."""
        return self.region.elements * self.dtype.itemsize

    def target_view(self) -> torch.Tensor:
        """Return the elements to fill."""
        return self.target_run.view(self.target.tensor.detach().view(-1), self.region)


def load(path: Path, wanted: Sequence[Piece], coordinator: Coordinator) -> Mapping[str, Any]:
    """Fill the wanted pieces from a checkpoint, which any number of ranks may have saved.

    Values are cast to the dtype of the piece that they fill. Other tensors of the checkpoint are not read.
    Hashes are not checked: `verify` does that, and `load_verified` while it reads.

    Args:
        path: The directory of the checkpoint.
        wanted: The pieces that this rank wants; each piece's tensor is filled in place.
        coordinator: The ranks that load together; each has its own `wanted`.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: A tensor is not in the checkpoint, or has another shape. The message names it, and
            the rank that wants it. All ranks raise the same error.
        CorruptCheckpointError: The manifest or a file cannot be read. All ranks raise the same error.
    """
    states = attempt_together(coordinator, f"cannot load {path}", lambda: _load_share(path, wanted))
    return states[coordinator.rank]


def _load_share(path: Path, wanted: Sequence[Piece]) -> Mapping[str, Any]:
    manifest = read_manifest(path)
    fill(path, manifest, wanted)
    return manifest.state


def fill(path: Path, manifest: Manifest, wanted: Sequence[Piece]) -> None:
    """Fill the wanted pieces from a checkpoint whose manifest was read; errors as in `load`."""
    with BounceBuffers() as buffers:
        for name, copies in sorted(copies_by_file(manifest, wanted).items()):
            with opened(path / name) as reader:
                for copy in in_order_of_file(copies, reader):
                    perform(copy, reader, reader, buffers)


def copies_by_file(manifest: Manifest, wanted: Sequence[Piece]) -> dict[str, list[Copy]]:
    """Return the copies that fill the wanted pieces, for each file that holds any of them.

    Raises:
        CheckpointError: A tensor is not in the checkpoint, or has another shape, or a dtype that does not
            convert to the wanted one.
    """
    by_file: defaultdict[str, list[Copy]] = defaultdict(list)
    for piece in wanted:
        for copy in _copies(manifest, piece):
            by_file[copy.source.file].append(copy)
    return by_file


def in_order_of_file(copies: Iterable[Copy], reader: ShardReader) -> list[Copy]:
    """Return copies from a file in its order; those that are not consecutive in it come last."""
    return sorted(copies, key=lambda copy: (copy.first is None, reader.start(copy.key), copy.first or 0))


@contextmanager
def opened(path: Path) -> Iterator[ShardReader]:
    """Open a file of a checkpoint.

    Raises:
        CorruptCheckpointError: It cannot be opened, or something in this context could not be read.
    """
    try:
        with ShardReader(path) as reader:
            yield reader
    except (OSError, ValueError, SafetensorError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error


def _copies(manifest: Manifest, piece: Piece) -> Iterator[Copy]:
    record = manifest.tensors.get(piece.name)
    if record is None:
        hint = nearest(piece.name, manifest.tensors)
        raise CheckpointError(f"tensor {piece.name!r} is not in the checkpoint{hint}")
    if record.shape != piece.shape:
        raise CheckpointError(
            f"tensor {piece.name!r} has shape {list(record.shape)} in the checkpoint, "
            f"and {list(piece.shape)} is expected"
        )
    dtype = dtype_named(record.dtype)
    if not _converts(dtype, piece.tensor.dtype):
        raise CheckpointError(
            f"tensor {piece.name!r} is {_title(dtype)} in the checkpoint, and {_title(piece.tensor.dtype)} "
            "is expected, to which it does not convert: use the type of the run that saved it"
        )
    mine = (piece.block, piece.start, piece.stop)
    for source in record.pieces:
        held = (source.block(record.shape), source.start, source.stop)
        for source_run, target_run, region in overlaps(held, mine):
            yield Copy(source, piece, source_run, target_run, region, dtype)


def _converts(one: torch.dtype, other: torch.dtype) -> bool:
    """Return whether values of a type can be those of another one, for floating types with rounding."""
    is_wider_integer = not one.is_floating_point and one.itemsize < other.itemsize
    return other.is_floating_point or one == other or is_wider_integer


def _title(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def perform(
    copy: Copy, reader: ShardReader, consecutive: ShardReader | HashedPass, buffers: BounceBuffers
) -> None:
    """Copy from a file, without memory in between where elements are consecutive in both.

    Args:
        copy: The copy.
        reader: The file.
        consecutive: Reads elements that are consecutive in the file.
        buffers: What copies to a device go through.
    """
    target, first = copy.target_view(), copy.first
    if first is None:
        buffers.put(target, copy.source_run.view(reader.mapped(copy.key).reshape(-1), copy.region))
    elif buffers.is_on_device(target):
        buffers.fill(target, copy.dtype, partial(_read, consecutive, copy.key, first))
    elif target.dtype == copy.dtype and target.device.type == "cpu" and target.is_contiguous():
        consecutive.read(copy.key, first, target)
    else:
        values = torch.empty(target.shape, dtype=copy.dtype)
        consecutive.read(copy.key, first, values)
        target.copy_(values)


def _read(
    consecutive: ShardReader | HashedPass, key: str, first: int, index: int, host: torch.Tensor
) -> None:
    consecutive.read(key, first + index, host)
    consecutive.settle()  # the buffer is soon used again
