"""Loads checkpoints: each rank reads the elements that it wants from the files that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shoal.checkpoint.coordinator import Coordinator, attempt_together
from shoal.checkpoint.manifest import Manifest, StoredPiece, read_manifest
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.reader import ShardReader
from shoal.checkpoint.region import Region, Run, overlaps
from shoal.checkpoint.shard import dtype_named
from shoal.errors import CheckpointError, CorruptCheckpointError, nearest

__all__ = ["fill", "load"]


@dataclass(frozen=True)
class _Copy:
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

    def target_view(self) -> torch.Tensor:
        """Return the elements to fill."""
        return self.target_run.view(self.target.tensor.detach().view(-1), self.region)


def load(path: Path, wanted: Sequence[Piece], coordinator: Coordinator) -> Mapping[str, Any]:
    """Fill the wanted pieces from a checkpoint, which any number of ranks may have saved.

    Values are cast to the dtype of the piece that they fill. Other tensors of the checkpoint are not read.
    Hashes are not checked: `verify` does that.

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
    by_file: defaultdict[str, list[_Copy]] = defaultdict(list)
    for piece in wanted:
        for copy in _copies(manifest, piece):
            by_file[copy.source.file].append(copy)
    for name, copies in sorted(by_file.items()):
        try:
            with ShardReader(path / name) as reader:
                for copy in sorted(copies, key=lambda copy: reader.start(copy.key)):
                    _perform(copy, reader)
        except (OSError, ValueError, SafetensorError) as error:
            raise CorruptCheckpointError(f"{path / name} cannot be read: {error}") from error


def _copies(manifest: Manifest, piece: Piece) -> Iterator[_Copy]:
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
    mine = (piece.block, piece.start, piece.stop)
    for source in record.pieces:
        held = (source.block(record.shape), source.start, source.stop)
        for source_run, target_run, region in overlaps(held, mine):
            yield _Copy(source, piece, source_run, target_run, region, dtype)


def _perform(copy: _Copy, reader: ShardReader) -> None:
    """Copy from a file, without memory in between where elements are consecutive in both."""
    target, first = copy.target_view(), copy.source_run.first_of(copy.region)
    if first is None:
        target.copy_(copy.source_run.view(reader.mapped(copy.key).reshape(-1), copy.region))
    elif target.dtype == copy.dtype and target.device.type == "cpu" and target.is_contiguous():
        reader.read(copy.key, first, target)
    else:
        held = torch.empty(target.shape, dtype=copy.dtype)
        reader.read(copy.key, first, held)
        target.copy_(held)
