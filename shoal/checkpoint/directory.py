"""The names of checkpoints in their directory, and of the leftovers when a process dies.

    step-00000100           a complete checkpoint of step 100
    step-00000100.1         the same step, saved again: a revision; the highest is the newest
    step-00000100.7.tmp     a checkpoint that is being written, or was when its writer died; 7 is the number
                            of the writer's claim
    step-00000100.deleted   a checkpoint that is being deleted, or was when its deleter died

One rename makes a checkpoint complete, and one rename makes it deleted. POSIX has no rename that replaces a
directory with files in it. So a step that is saved again gets a new revision, and the earlier revision is
deleted after that: at every moment one of the two is complete. One process (rank 0) renames and deletes: the
one that has claimed the directory, see `shoal.run.writer`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path

from shoal.checkpoint.files import FileSystem, remove_tree
from shoal.errors import CheckpointError

_COMPLETE = re.compile(r"step-([0-9]+)(?:\.([0-9]+))?")
_LEFT_OVER = re.compile(r"step-[0-9]+(?:\.([0-9]+))?\.(tmp|deleted)")


def checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in `directory`, newest first; none if the directory does not exist.

    The name shows that a checkpoint is complete, because the last rename gives it. Only `verify` can say
    whether it is still sound.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    try:
        found = [path for path in directory.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    return sorted(found, key=lambda path: (_order(path), path.name), reverse=True)


def resolve(path: Path) -> list[Path]:
    """Return the checkpoints that a user's path means, newest first.

    Args:
        path: A checkpoint, a directory of checkpoints, or a run (which holds `checkpoints/`).

    Raises:
        CheckpointError: The path is none of these, or holds no checkpoint.
    """
    real = Path(os.path.realpath(path))  # unlike `resolve`, this raises no error for links in a circle
    if _COMPLETE.fullmatch(real.name) and real.is_dir():
        return [real]
    found = checkpoints(path) or checkpoints(path / "checkpoints")
    if not found:
        problem = "holds no checkpoint" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {problem}; give a step-N directory, a directory that holds such directories, or a run "
            "with checkpoints/"
        )
    return found


def step_of(path: Path) -> int:
    """Return the step of a complete checkpoint, from its name."""
    return _order(path)[0]


def age_of(name: str) -> tuple[int, int] | None:
    """Return step and revision, by which complete checkpoints are ordered; None for any other name.

    The first save of a step is revision 0.
    """
    match = _COMPLETE.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def staging_path(directory: Path, step: int, writer: int) -> Path:
    """Return the path where a checkpoint of `step` is written before it is complete.

    Args:
        directory: The directory of checkpoints.
        step: The step.
        writer: Number of the writer's claim on the directory.
    """
    return directory / f"{_name(step)}.{writer}.tmp"


def free_path(directory: Path, step: int) -> Path:
    """Return the path of a complete checkpoint of `step`: the first revision that is newer than all.

    Whatever has such a name counts, such as a link to a checkpoint that is gone: nothing can take its name.
    """
    ages = map(age_of, os.listdir(directory))
    revisions = [age[1] for age in ages if age is not None and age[0] == step]
    return directory / (f"{_name(step)}.{max(revisions) + 1}" if revisions else _name(step))


def delete(paths: Iterable[Path], files: FileSystem) -> None:
    """Delete checkpoints of one directory; every reader finds each complete, or does not find it.

    They are renamed, and the renames are on the disk, before any file in them is removed.
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


def sweep(directory: Path, files: FileSystem, writer: int, begun: Collection[str] = ()) -> None:
    """Remove checkpoints that an earlier process left half written or half deleted.

    What cannot be removed, such as a file of another user, or one that another host has open over NFS, stays
    with a name that no writer uses. It costs space, and a warning names it.

    Args:
        directory: The directory of checkpoints.
        files: The FileSystem to remove them from.
        writer: Number of this process's claim on the directory; what a later one writes stays.
        begun: Names of those that this process is writing now, which stay.
    """
    for path in sorted(directory.iterdir()):
        match = _LEFT_OVER.fullmatch(path.name)
        if path.name in begun:  # looked at after the listing: an entry is there before its directory
            continue
        if match and (match[2] == "deleted" or int(match[1] or 0) <= writer):
            try:
                remove_tree(path, files)
            except OSError as error:
                # The process that began it may wake, and must not find it in its place.
                if match[2] == "tmp":
                    files.rename(path, path := path.with_suffix(".deleted"))
                warnings.warn(
                    f"{path} is left of an earlier save, and cannot be removed: {error}", stacklevel=2
                )


def _name(step: int) -> str:
    """Return the name for a step, padded so that listings sort by step; no code relies on the padding."""
    return f"step-{step:08d}"


def _order(path: Path) -> tuple[int, int]:
    """Return step and revision of a complete checkpoint."""
    age = age_of(path.name)
    if age is None:
        raise CheckpointError(f"{path} is not a checkpoint: the name of its directory must be step-N")
    return age
