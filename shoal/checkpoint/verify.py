"""Verifies that a checkpoint is still what was written, and finds the newest that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.checkpoint.coordinator import Coordinator, SingleProcess, attempt_on_rank_zero, attempt_together
from shoal.checkpoint.directory import checkpoints
from shoal.checkpoint.files import hash_of_file
from shoal.checkpoint.manifest import Manifest, read_manifest
from shoal.errors import CorruptCheckpointError

__all__ = ["check_sizes", "latest", "newest_verified", "verify"]


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
        candidates: Checkpoints, newest first; those of rank 0 count.
        coordinator: The ranks, which all get the same answer.
        say: Function that is called on rank 0 with one line for each corrupt checkpoint that is skipped.

    Returns:
        The checkpoint, or None if there is none that verifies.
    """
    shared: list[Path] = coordinator.all_gather_object(list(candidates))[0]
    for path in shared:
        try:
            verify(path, coordinator)
        except CorruptCheckpointError as error:
            if coordinator.rank == 0:
                say(f"checkpoint {path.name} is corrupt and is skipped: {error}")
        else:
            return path
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
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise CorruptCheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if size != record.size:
            raise CorruptCheckpointError(f"{path / name} has {size} bytes; the manifest says {record.size}")
    return manifest


def _verify_share(path: Path, coordinator: Coordinator) -> None:
    manifest = check_sizes(path)
    # Assign files by size, largest first, so that the ranks read about as much each.
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    for name in by_size[coordinator.rank :: coordinator.size]:
        try:
            found = hash_of_file(path / name)
        except OSError as error:
            raise CorruptCheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if found != manifest.files[name].sha256:
            raise CorruptCheckpointError(
                f"{path / name} was changed after it was written: its sha256 differs"
            )
