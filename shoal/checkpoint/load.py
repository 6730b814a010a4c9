"""Loading: each rank reads the elements that it wants, from whichever files hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shoal.checkpoint.exchange import Exchange, attempt_together
from shoal.checkpoint.manifest import Manifest, StoredPiece, read_manifest
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.shard import read_interval
from shoal.errors import CheckpointError, CorruptCheckpointError, nearest

__all__ = ["load"]


@dataclass(frozen=True)
class _Copy:
    """The elements [start, stop) of a tensor, from a stored piece into a wanted one."""

    source: StoredPiece
    target: Piece
    start: int
    stop: int


def load(path: Path, wanted: Sequence[Piece], exchange: Exchange) -> Mapping[str, Any]:
    """Fills the wanted pieces from a checkpoint, which any number of ranks may have saved.

    Values are cast to the dtype of the piece that they fill. What the checkpoint holds beyond `wanted` is not
    read. Hashes are not checked: `verify` does that.

    Args:
        path: The directory of the checkpoint.
        wanted: What this rank wants; each piece's tensor is filled in place.
        exchange: The ranks that load together; each has its own `wanted`.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: On all ranks alike: a tensor is not in the checkpoint, or has another shape. It is
            named, with the rank that wants it.
        CorruptCheckpointError: On all ranks alike: the manifest or a file cannot be read.
    """
    manifests = attempt_together(exchange, f"cannot load {path}", lambda: _load_share(path, wanted))
    return manifests[exchange.rank]


def _load_share(path: Path, wanted: Sequence[Piece]) -> Mapping[str, Any]:
    manifest = read_manifest(path)
    by_file: defaultdict[str, list[_Copy]] = defaultdict(list)
    for piece in wanted:
        for copy in _copies(manifest, piece):
            by_file[copy.source.file].append(copy)
    for name, copies in sorted(by_file.items()):
        try:
            with safe_open(path / name, framework="pt") as opened:
                for copy in copies:
                    _perform(copy, opened)
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpointError(f"{path / name} cannot be read: {error}") from error
    return manifest.state


def _copies(manifest: Manifest, piece: Piece) -> Iterator[_Copy]:
    record = manifest.tensors.get(piece.name)
    if record is None:
        hint = nearest(piece.name, manifest.tensors)
        raise CheckpointError(f"tensor {piece.name!r} is not in the checkpoint{hint}")
    if record.shape != piece.shape:
        raise CheckpointError(
            f"tensor {piece.name!r} has shape {list(record.shape)} in the checkpoint, "
            f"and {list(piece.shape)} where it is wanted"
        )
    for source in record.pieces:
        start, stop = max(piece.start, source.start), min(piece.stop, source.stop)
        if start < stop:
            yield _Copy(source, piece, start, stop)


def _perform(copy: _Copy, opened: Any) -> None:
    key = copy.source.key(copy.target.name, copy.target.shape)
    values = read_interval(opened, key, copy.start - copy.source.start, copy.stop - copy.source.start)
    flat = copy.target.tensor.detach().view(-1)
    flat[copy.start - copy.target.start : copy.stop - copy.target.start].copy_(values)
