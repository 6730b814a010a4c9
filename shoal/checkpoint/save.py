"""Saves checkpoints. The protocol has these steps, in order:

1. Rank 0 removes leftovers of earlier processes, and makes `step-N.tmp/`.
2. Each rank that holds elements writes `rank-R.safetensors` there, hashes it while writing, and syncs it.
3. Rank 0 checks that the pieces cover every tensor exactly once, writes `manifest.json`, syncs it and the
   directory, renames the directory to `step-N`, and syncs the parent. The rename makes it complete.
4. Rank 0 deletes an earlier checkpoint of the same step, if there is one.

After each of steps 1 to 3 the ranks tell each other the result. A crash or an error before the rename leaves
the earlier checkpoints as they were; after the rename, the new one is there too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.checkpoint.coordinator import Coordinator, attempt_on_rank_zero, attempt_together
from shoal.checkpoint.directory import checkpoints, delete, free_path, staging_path, step_of, sweep
from shoal.checkpoint.files import REAL_FILES, FileSystem, remove_tree, write_file
from shoal.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord, merge
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.shard import describe, write_shard
from shoal.errors import CheckpointError

__all__ = ["save"]

_Part = tuple[dict[str, FileRecord], dict[str, TensorRecord]]
"""The files that one rank wrote, and the tensors in them."""


def save(
    directory: Path,
    step: int,
    pieces: Sequence[Piece],
    state: Mapping[str, Any],
    coordinator: Coordinator,
    files: FileSystem = REAL_FILES,
) -> Path:
    """Save a checkpoint; all ranks call this together.

    If the step has a checkpoint already, the new one gets another name (see `directory.py`), and the old one
    is deleted after it is complete: use the path that is returned.

    Args:
        directory: The directory of checkpoints, on a file system that all ranks see; made if it is missing.
        step: The optimizer step after which the checkpoint is saved.
        pieces: The pieces that this rank holds. The pieces of all ranks cover every tensor exactly once.
        state: A JSON object, kept in the manifest; rank 0's is saved.
        coordinator: The ranks.
        files: The FileSystem to write to.

    Returns:
        The directory of the checkpoint, equal on every rank.

    Raises:
        CheckpointError: Saving failed: a full disk, a gap or an overlap in the pieces, a state that is not
            JSON. The message names the rank and the reason, and all ranks raise the same error. Files that
            are half written are removed if possible.
    """
    staging = staging_path(directory, step)
    purpose = f"cannot save step {step} in {directory}"
    try:
        attempt_on_rank_zero(coordinator, purpose, lambda: _prepare(staging, files))
        parts = attempt_together(
            coordinator, purpose, lambda: _write_part(staging, coordinator.rank, pieces, files)
        )
        target = attempt_on_rank_zero(
            coordinator, purpose, lambda: _commit(staging, _manifest(step, parts, state), files)
        )
    except BaseException:
        if coordinator.rank == 0:
            with contextlib.suppress(OSError):
                remove_tree(staging, files)
        raise
    if coordinator.rank == 0:
        # The new checkpoint is safe. An old one that cannot be removed costs space, but is no failure.
        with contextlib.suppress(OSError):
            superseded = [path for path in checkpoints(directory) if step_of(path) == step and path != target]
            delete(superseded, files)
    return target


def _prepare(staging: Path, files: FileSystem) -> None:
    directory = staging.parent
    if not directory.exists():
        files.make_directory(directory)
        files.sync_directory(directory.parent)
    sweep(directory, files)
    files.make_directory(staging)


def _write_part(staging: Path, rank: int, pieces: Sequence[Piece], files: FileSystem) -> _Part:
    name = f"rank-{rank:05d}.safetensors"
    tensors = describe(name, pieces)
    if not any(tensor.pieces for tensor in tensors.values()):
        return {}, tensors
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging}, which rank 0 made, is missing on this rank: all ranks must see the same file system"
        )
    return {name: write_shard(staging / name, pieces, files)}, tensors


def _manifest(step: int, parts: Sequence[_Part], state: Mapping[str, Any]) -> Manifest:
    written = {name: file for part_files, _ in parts for name, file in part_files.items()}
    return merge(step, written, (tensors for _, tensors in parts), state)


def _commit(staging: Path, manifest: Manifest, files: FileSystem) -> Path:
    write_file(staging / MANIFEST_NAME, iter([memoryview(manifest.to_json())]), files)
    files.sync_directory(staging)
    target = free_path(staging.parent, manifest.step)
    files.rename(staging, target)
    files.sync_directory(target.parent)
    return target
