"""The names of checkpoints in their directory, and of the leftovers when a process dies.

    step-00000100           a complete checkpoint of step 100
    step-00000100.1         the same step, saved again: a revision; the highest is the newest
    step-00000100.7.tmp     a checkpoint that is being written, or was when its writer died; 7 is the number
                            of the writer's claim
    step-00000100.deleted   a checkpoint that is being deleted, or was when its deleter died

One rename makes a checkpoint complete, and one rename makes it deleted. POSIX has no rename that replaces a
directory with files in it. So a step that is saved again gets a new revision, and the earlier revision is
deleted after that: at every moment one of the two is complete. One process (rank 0) renames and deletes: the
one that has claimed the directory, see `shoal.spec.run.writer`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from shoal.checkpoint.coordinator import Coordinator, SingleProcess, attempt_on_rank_zero, attempt_together
from shoal.checkpoint.files import REAL_FILES, FileSystem, hash_of_file, remove_tree
from shoal.checkpoint.manifest import FileRecord, Manifest, read_manifest
from shoal.errors import CheckpointError, ConfigError, CorruptCheckpointError
from shoal.spec.run.writer import claimed

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


T = TypeVar("T")


def verify(path: Path, coordinator: Coordinator | None = None) -> None:
    """Read a checkpoint in full and compare it with its manifest.

    Args:
        path: The directory of the checkpoint.
        coordinator: The ranks that share the reading and then agree; None for this process alone.

    Raises:
        CorruptCheckpointError: A file is missing, or its size or hash is not that of the manifest, or the
            manifest itself is missing, incomplete, altered or of another format. The message names the file
            and the fault.
    """
    ranks = coordinator or SingleProcess()
    attempt_together(ranks, f"cannot verify {path}", lambda: _verify_share(path, ranks))


def newest_verified(
    candidates: Sequence[Path], coordinator: Coordinator, say: Callable[[str], object]
) -> Path | None:
    """Return the first of `candidates` that verifies.

    Args:
        candidates, coordinator, say: See `newest_sound`.

    Returns:
        The checkpoint, or None if there is none that verifies.
    """
    found = newest_sound(candidates, coordinator, say, lambda path: verify(path, coordinator))
    return None if found is None else found[0]


def newest_sound(
    candidates: Sequence[Path],
    coordinator: Coordinator,
    say: Callable[[str], object],
    attempt: Callable[[Path], T],
) -> tuple[Path, T] | None:
    """Attempt one checkpoint after the other, until one is not corrupt.

    Args:
        candidates: Checkpoints, newest first; those of rank 0 count.
        coordinator: The ranks, which all get the same checkpoint.
        say: Function that is called on rank 0 with one line for each corrupt checkpoint that is skipped.
        attempt: Function that all ranks call together with a checkpoint. It raises CorruptCheckpointError on
            all of them, or on none.

    Returns:
        The checkpoint, with the result of the attempt; None if all are corrupt.
    """
    shared: list[Path] = coordinator.all_gather_object(list(candidates))[0]
    for path in shared:
        try:
            return path, attempt(path)
        except CorruptCheckpointError as error:
            if coordinator.rank == 0:
                say(f"checkpoint {path.name} is corrupt and is skipped: {error}")
    return None


def latest(directory: Path, coordinator: Coordinator, say: Callable[[str], object]) -> Path | None:
    """Return the newest checkpoint in `directory` that verifies; see `newest_verified`."""
    found = attempt_on_rank_zero(coordinator, f"cannot list {directory}", lambda: checkpoints(directory))
    return newest_verified(found, coordinator, say)


def check_sizes(path: Path) -> Manifest:
    """Check that every file of a checkpoint is there in full, without reading the tensors.

    Returns:
        The checkpoint's manifest.

    Raises:
        CorruptCheckpointError: A file is missing or has another size, or the manifest is not what was
            written. The message names the file.
    """
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        check_size(path / name, record)
    return manifest


def read_together(path: Path, coordinator: Coordinator) -> Manifest:
    """Read a manifest on every rank, without the tensors.

    Raises:
        CorruptCheckpointError: A rank cannot read it. All ranks raise the same error.
    """
    read: list[Manifest] = []
    attempt_together(coordinator, f"cannot load {path}", lambda: read.append(read_manifest(path)))
    return read[0]


def check_size(path: Path, record: FileRecord) -> None:
    """Check that a file is there in full; errors as in `check_sizes`."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if size != record.size:
        raise CorruptCheckpointError(f"{path} has {size} bytes; the manifest says {record.size}")


def check_hash(path: Path, found: str, record: FileRecord) -> None:
    """Check the SHA-256 that a file has now.

    Raises:
        CorruptCheckpointError: It is not that of the manifest.
    """
    if found != record.sha256:
        raise CorruptCheckpointError(f"{path} was changed after it was written: its sha256 differs")


def retain(
    directory: Path,
    keep: int,
    coordinator: Coordinator,
    say: Callable[[str], object] = lambda _: None,
    files: FileSystem = REAL_FILES,
    *,
    sound: Path | None = None,
) -> list[Path]:
    """Delete the oldest checkpoints, so that `keep` stay; all ranks call this together.

    At least one checkpoint that stays is known to be sound before any is deleted: it is `sound`, or it is
    verified. `sound` stays though `keep` others may have higher steps, as after a return to an earlier step.
    If none of the newest `keep` is sound, the newest sound one among the older stays too. If none is sound,
    none is deleted. One that this process is copying to a store stays until a later call. A link to a
    checkpoint, which no save makes, stays and is none of the `keep`.

    Args:
        directory: The directory of checkpoints.
        keep: Number of newest checkpoints that stay, at least 1.
        coordinator: The ranks, which share the verification.
        say: Function that is called on rank 0 with one line for each corrupt checkpoint that is found.
        files: The FileSystem that they are deleted from.
        sound: A checkpoint that these ranks have just saved or verified, so that none is read again.

    Returns:
        The directories that were deleted, newest first, equal on every rank.

    Raises:
        ConfigError: `keep` is less than 1.
        CheckpointError: The disk reported an error. All ranks raise the same error.
    """
    if keep < 1:
        raise ConfigError(
            f"keep={keep} would delete the only checkpoint",
            possible="1 or more",
            change="give the number of newest checkpoints to keep",
        )
    purpose = f"cannot delete old checkpoints in {directory}"
    found, read = attempt_on_rank_zero(coordinator, purpose, lambda: _list_and_sweep(directory, files))
    kept, surplus = found[:keep], [each for each in found[keep:] if each != sound and each.name not in read]
    if not surplus:
        return []
    if sound not in found and newest_verified(kept, coordinator, say) is None:
        survivor = newest_verified(surplus, coordinator, say)
        surplus = [path for path in surplus if path != survivor] if survivor is not None else []
    attempt_on_rank_zero(coordinator, purpose, lambda: _delete(directory, surplus, files))
    return surplus


def _verify_share(path: Path, coordinator: Coordinator) -> None:
    files = read_manifest(path).files
    # Assign files by size, largest first, so that the ranks read about as much each.
    by_size = sorted(files, key=lambda name: (-files[name].size, name))[coordinator.rank :: coordinator.size]
    for name in by_size:
        check_size(path / name, files[name])
    for name in by_size:
        try:
            found = hash_of_file(path / name)
        except OSError as error:
            raise CorruptCheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        check_hash(path / name, found, files[name])


def _list_and_sweep(directory: Path, files: FileSystem) -> tuple[list[Path], set[str]]:
    """Return the checkpoints, newest first, and the names of those that this process reads now."""
    found = [path for path in checkpoints(directory) if not path.is_symlink()]
    if not found:
        return [], set()
    with claimed(directory) as writer:
        sweep(directory, files, writer.number, writer.begun)
        return found, set(writer.read)


def _delete(directory: Path, surplus: list[Path], files: FileSystem) -> None:
    with claimed(directory) as writer:
        writer.require_newest()
        delete(surplus, files)
