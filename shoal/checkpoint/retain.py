"""Deletes old checkpoints, but never the last one that verifies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.checkpoint.coordinator import Coordinator, attempt_on_rank_zero
from shoal.checkpoint.directory import checkpoints, delete, sweep
from shoal.checkpoint.files import REAL_FILES, FileSystem
from shoal.checkpoint.verify import newest_verified
from shoal.errors import ConfigError
from shoal.run.writer import claimed

__all__ = ["retain"]


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
