"""The names of checkpoints in their directory, and what is left there when a process dies.

    step-00000100           a complete checkpoint of step 100
    step-00000100.1         the same step, saved again: a revision; the highest is the newest
    step-00000100.tmp       one that is being written, or was when its writer died
    step-00000100.deleted   one that is being deleted, or was

A checkpoint becomes complete, and stops being so, by one rename. POSIX has no rename that replaces a
directory with files in it, so a step saved again gets a new revision, and the one before is deleted when the
new one is in place: at every moment one of the two is complete. One process (rank 0) renames and deletes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from shoal.checkpoint.files import FileSystem, remove_tree
from shoal.errors import CheckpointError

__all__ = ["checkpoints", "delete", "free_path", "resolve", "staging_path", "step_of", "sweep"]

_COMPLETE = re.compile(r"step-([0-9]+)(?:\.([0-9]+))?")
_LEFT_OVER = re.compile(r"step-[0-9]+(?:\.[0-9]+)?\.(?:tmp|deleted)")


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory`, newest first; none if the directory does not exist.

    Complete is what has a complete one's name, since that is given last. Whether it is still sound, only
    `verify` can say.
    """
    try:
        found = [path for path in directory.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda path: (_order(path), path.name), reverse=True)


def resolve(path: Path) -> list[Path]:
    """The checkpoints that a user's path means, newest first.

    Args:
        path: A checkpoint, a directory of checkpoints, or a run (which holds `checkpoints/`).

    Raises:
        CheckpointError: It is none of these, or holds no checkpoint.
    """
    real = path.resolve()
    if _COMPLETE.fullmatch(real.name) and real.is_dir():
        return [real]
    found = checkpoints(path) or checkpoints(path / "checkpoints")
    if not found:
        problem = "holds no checkpoint" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {problem}; give a step-N directory, a directory of these, or a run that has checkpoints/"
        )
    return found


def step_of(path: Path) -> int:
    """The step of a complete checkpoint, from its name."""
    return _order(path)[0]


def staging_path(directory: Path, step: int) -> Path:
    """Where a checkpoint of `step` is written before it is complete."""
    return directory / f"{_name(step)}.tmp"


def free_path(directory: Path, step: int) -> Path:
    """Where a checkpoint of `step` goes when it is complete: the first revision that is newer than all."""
    revisions = [_order(path)[1] for path in checkpoints(directory) if step_of(path) == step]
    return directory / (f"{_name(step)}.{max(revisions) + 1}" if revisions else _name(step))


def delete(paths: Iterable[Path], files: FileSystem) -> None:
    """Deletes checkpoints of one directory; each is complete to every reader, or not there.

    They are renamed before anything in them is removed, and the renames are on the disk before that too.
    """
    condemned = []
    for path in paths:
        target = path.with_name(f"{path.name}.deleted")
        files.rename(path, target)
        condemned.append(target)
    for parent in {path.parent for path in condemned}:
        files.sync_directory(parent)
    for path in condemned:
        remove_tree(path, files)


def sweep(directory: Path, files: FileSystem) -> None:
    """Removes what an earlier process left half written or half deleted."""
    for path in sorted(directory.iterdir()):
        if _LEFT_OVER.fullmatch(path.name):
            remove_tree(path, files)


def _name(step: int) -> str:
    """Padded so that names sort by step in a listing; nothing here relies on the padding."""
    return f"step-{step:08d}"


def _order(path: Path) -> tuple[int, int]:
    """Step and revision; the first save of a step is revision 0."""
    match = _COMPLETE.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not the directory of a checkpoint: those are called step-N")
    return int(match[1]), int(match[2] or 0)
