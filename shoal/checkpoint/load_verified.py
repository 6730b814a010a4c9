"""Loads a checkpoint and verifies it meanwhile. The protocol has these steps, in order:

1. Each rank tells of which files it wants most. From this all ranks choose the same reader for each file: the
   rank that wants most of it, or, for a file of which nobody tells, the rank with the least to read.
2. The reader of a file reads it in full, and hashes it meanwhile. Its own elements go to their place on the
   way, if that is new memory; other ranks read only what they want. Under the Plan of the save each file is
   read once.
3. The ranks tell each other the result. Only if all files are sound, each reads what replaces values that are
   in use. It passed through memory just before, and mostly is in the system's cache. To keep it instead would
   take new memory, which comes slowly from some systems: it took three times as long as to read it again.

Where no file system holds all of a checkpoint (`Spread`), a rank first gets the files that it wants from
other hosts, which verifies them, and a file is read by those alone that want some of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from pathlib import Path

from shoal.checkpoint.coordinator import Coordinator, attempt_together
from shoal.checkpoint.load import Copy, copies_by_file, fill, in_order_of_file, opened, perform
from shoal.checkpoint.manifest import FileRecord, Manifest
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.reader import HashedPass
from shoal.checkpoint.spread import Spread
from shoal.checkpoint.verify import check_hash, check_size
from shoal.collectives.bounce_buffers import BounceBuffers
from shoal.errors import CheckpointError, TrainingError

__all__ = ["load_verified"]

_TOLD = 4  # files of which a rank tells, so that what all ranks tell grows with their number alone


def load_verified(
    path: Path,
    manifest: Manifest,
    coordinator: Coordinator,
    *,
    fresh: Sequence[Piece] = (),
    in_use: Sequence[Piece] = (),
    spread: Spread | None = None,
) -> None:
    """Fill pieces as `load` does, and compare every file of the checkpoint with its hash; all ranks call it.

    Args:
        path: The directory of the checkpoint.
        manifest: Its manifest.
        coordinator: The ranks that load together; each has its own pieces.
        fresh: Pieces that are filled as they are read. After an error their values mean nothing.
        in_use: Pieces that are filled once all files are known to be sound: after an error they are as
            before.
        spread: How the checkpoints of a directory are spread over hosts, if there is such a directory.

    Raises:
        CheckpointError: A tensor is not in the checkpoint, or does not fit. All ranks raise the same error.
        CorruptCheckpointError: A file is not what was written. All ranks raise the same error.
        TrainingError: A sound file could not be read once more, and pieces in use may be filled in part. All
            ranks raise the same error.
    """
    purpose = f"cannot load {path}"
    mine: dict[str, list[Copy]] = {}

    def choose() -> dict[str, int]:
        wants = {name: _nbytes(copies) for name, copies in copies_by_file(manifest, in_use).items()}
        mine.update(copies_by_file(manifest, fresh))
        for name, copies in mine.items():
            wants[name] = wants.get(name, 0) + _nbytes(copies)
        return {name: wants[name] for name in nlargest(_TOLD, wants, key=wants.__getitem__)}

    readers = _readers(manifest.files, attempt_together(coordinator, purpose, choose))
    to_verify = {name for name, rank in readers.items() if rank == coordinator.rank}
    if spread is not None and path.parent != spread.directory:
        spread = None

    def read() -> None:
        if spread is not None:
            wanted = mine.keys() | copies_by_file(manifest, in_use).keys()
            to_verify.intersection_update(wanted)
            spread.require(path, manifest, wanted)
        for name in to_verify:
            check_size(path / name, manifest.files[name])
        with BounceBuffers() as buffers:
            for name in sorted(mine.keys() | to_verify):
                if name in to_verify:
                    _read_and_verify(path / name, manifest.files[name], mine.get(name, []), buffers)
                else:
                    with opened(path / name) as reader:
                        for copy in in_order_of_file(mine[name], reader):
                            perform(copy, reader, reader, buffers)

    attempt_together(coordinator, purpose, read)
    try:
        attempt_together(coordinator, purpose, lambda: fill(path, manifest, in_use))
    except CheckpointError as error:
        raise TrainingError(
            f"{path} was sound, and could not be read once more: the model is loaded only in part: {error}"
        ) from error


def _nbytes(copies: Sequence[Copy]) -> int:
    return sum(copy.nbytes for copy in copies)


def _readers(files: Mapping[str, FileRecord], wants: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the rank that reads each file in full; ranks that want equal parts get about equal bytes."""
    wanted_by: dict[str, dict[int, int]] = {}
    for rank, told in enumerate(wants):
        for name, nbytes in told.items():
            wanted_by.setdefault(name, {})[rank] = nbytes
    to_read = [0] * len(wants)
    readers = {}
    for name in sorted(files, key=lambda name: (name not in wanted_by, -files[name].size, name)):
        by_rank = wanted_by.get(name) or dict.fromkeys(range(len(wants)), 0)
        most = max(by_rank.values())
        readers[name] = min(
            (rank for rank, nbytes in by_rank.items() if nbytes == most),
            key=lambda rank: (to_read[rank], rank),
        )
        to_read[readers[name]] += files[name].size
    return readers


def _read_and_verify(path: Path, record: FileRecord, copies: Sequence[Copy], buffers: BounceBuffers) -> None:
    with opened(path) as reader, HashedPass(reader) as hashed:
        later = []
        for copy in in_order_of_file(copies, reader):
            if copy.first is None:
                later.append(copy)
            else:
                perform(copy, reader, hashed, buffers)
        check_hash(path, hashed.digest(), record)
        for copy in later:
            perform(copy, reader, reader, buffers)
