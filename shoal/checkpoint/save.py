"""Saves checkpoints. The protocol has these steps, in order:

1. Rank 0 claims the directory (see `shoal.spec.run.writer`), removes leftovers of earlier processes, and
   makes `step-N.W.tmp/`, where W is the number of its claim.
2. Each rank that holds elements writes `rank-R.safetensors` there, hashes it while writing, and syncs it.
   Constant pieces get a file of their own, `rank-R-constant.safetensors`. If its hash is that of the file in
   the checkpoint before, it becomes a hard link to that file, and nothing is written.
3. Rank 0 checks that the pieces cover every tensor exactly once, writes `manifest.json`, syncs it and the
   directory, checks that the claim is still its own, renames the directory to `step-N`, and syncs the parent.
   The rename makes it complete.
4. Rank 0 deletes an earlier checkpoint of the same step, if there is one, and older steps if that is asked
   (see `retain`).

Where no file system holds all of a checkpoint (`Spread`), the first rank of each host does what rank 0 does
here, with the manifest of all files, and copies files of another host before step 3.

After each of steps 1 to 3 the ranks tell each other the result. A crash or an error before the rename leaves
the earlier checkpoints as they were; after the rename, the new one is there too. A link keeps its content
when the checkpoint that it was made from is deleted.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from shoal.checkpoint.coordinator import (
    Coordinator,
    Spread,
    StoreCoordinator,
    attempt_for_rank_zero,
    attempt_on_rank_zero,
    attempt_together,
)
from shoal.checkpoint.directory import checkpoints, delete, free_path, retain, staging_path, step_of, sweep
from shoal.checkpoint.files import REAL_FILES, Chunks, FileSystem, remove_tree, write_file
from shoal.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord, merge
from shoal.checkpoint.region import Piece
from shoal.checkpoint.shard import Shard, Values, describe, own_values
from shoal.collectives.thread_device import on_callers_device
from shoal.errors import CheckpointError, ShoalError
from shoal.spec.run.writer import Claiming, Writer


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote.

    Attributes:
        files: The files.
        tensors: The tensors in them; None if they are those of the save before.
    """

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord] | None


@dataclass(frozen=True, slots=True)
class _Written:
    """A file that this process wrote into a checkpoint that is complete.

    Attributes:
        path: The file.
        record: Its size and hash.
        changed: When it was changed last, in nanoseconds.
    """

    path: Path
    record: FileRecord
    changed: int

    @classmethod
    def of(cls, path: Path, record: FileRecord) -> Self | None:
        """Return a file that was just written; None if it cannot be found."""
        try:
            return cls(path, record, path.stat().st_mtime_ns)
        except OSError:
            return None

    def is_unchanged(self) -> bool:
        """Return whether the file is there, as it was written for all that its size and time tell."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.record.size, self.changed)


def save(
    directory: Path,
    step: int,
    pieces: Sequence[Piece],
    state: Mapping[str, Any],
    coordinator: Coordinator,
    files: FileSystem = REAL_FILES,
    values: Values = own_values,
) -> Path:
    """Save a single checkpoint: see `Saver`."""
    return Saver(files, values).save(directory, step, pieces, state, coordinator)


@final
class Saver:
    """Save the checkpoints of a training, one after another.

    It remembers the constant pieces that it wrote, so that they need not be written again. It also remembers
    which tensors ranks have, so that these are told, merged and checked again only if they change.

    Args:
        files: The FileSystem to write to.
        values: Function that gives a piece's elements when they are written; see `Shard`.

    Attributes:
        spread: The directory whose checkpoints are spread over hosts, if there is one. There each host keeps
            only the newest.
    """

    def __init__(self, files: FileSystem = REAL_FILES, values: Values = own_values) -> None:
        self.files = files
        self.spread: Spread | None = None
        self._values = values
        self._files: dict[str, FileRecord] = {}  # those of this rank, of the last save
        self._chunks = Chunks()
        self._constant: _Written | None = None
        self._told: Mapping[str, TensorRecord] | None = None  # what rank 0 knows of this rank
        self._known: list[Mapping[str, TensorRecord]] = []  # on rank 0, of each rank
        self._merged: Mapping[str, TensorRecord] = {}
        self._claiming: dict[Path, Claiming] = {}  # each directory that this process saves to
        self._common = 0  # number of the claims that hosts save by together
        self._begun: tuple[Writer, str] | None = None  # what this process is writing, by its claim

    def save(
        self,
        directory: Path,
        step: int,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        coordinator: Coordinator,
        keep: int = 0,
        say: Callable[[str], object] = warnings.warn,
    ) -> Path:
        """Save a checkpoint; all ranks, always the same ones, call this together.

        If the step has a checkpoint already, the new one gets another name (see `directory.py`), and the old
        one is deleted after it is complete: use the path that is returned.

        Args:
            directory: The directory of checkpoints, on a file system that all ranks see; made if it is
                missing.
            step: The optimizer step after which the checkpoint is saved.
            pieces: The pieces that this rank holds. The pieces of all ranks cover every tensor exactly once.
            state: A JSON object, kept in the manifest; rank 0's is saved.
            coordinator: The ranks.
            keep: Number of newest checkpoints that stay, as in `retain`; 0 keeps all.
            say: Called with one line for each fault that costs nothing but space, such as an old checkpoint
                that cannot be deleted.

        Returns:
            The directory of the checkpoint, equal on every rank.

        Raises:
            CheckpointError: Saving failed: a full disk, a gap or an overlap in the pieces, a state that is
                not JSON, another process that writes the directory. The message names the rank and the
                reason, and all ranks raise the same error. Files that are half written are removed if
                possible.
        """
        staging: Path | None = None
        purpose = f"cannot save step {step} in {directory}"
        spread = self.spread if self.spread is not None and directory == self.spread.directory else None
        acts = coordinator.rank == 0 if spread is None else spread.is_first
        try:
            if spread is not None:
                number = self._claim_together(directory, purpose, coordinator, acts=acts)
                staging = staging_path(directory, step, number)
                return self._save_spread(spread, staging, purpose, step, pieces, state, coordinator)
            while not (
                name := attempt_on_rank_zero(coordinator, purpose, lambda: self._begin(directory, step))
            ):
                pass
            staging = directory / name
            target = attempt_for_rank_zero(
                coordinator,
                purpose,
                lambda: self._write_part(staging, coordinator.rank, pieces),
                lambda parts: self._commit(staging, self._manifest(step, parts, state)),
            )
        except BaseException:
            self._told, self._known = None, []
            if acts and staging is not None:
                with contextlib.suppress(OSError):
                    remove_tree(staging, self.files)
            raise
        finally:
            self._note_end()
        constant = _constant_name(coordinator.rank)
        if record := self._files.get(constant):
            self._constant = _Written.of(target / constant, record)
        if coordinator.rank == 0:
            # The new checkpoint is safe. An old one that cannot be removed costs space, but is no failure.
            with contextlib.suppress(OSError):
                older = [path for path in checkpoints(directory) if step_of(path) == step and path != target]
                delete(older, self.files)
        if keep:
            try:
                retain(directory, keep, coordinator, say, self.files, sound=target)
            except ShoalError as error:
                say(str(error))
        return target

    def _save_spread(
        self,
        spread: Spread,
        staging: Path,
        purpose: str,
        step: int,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        coordinator: Coordinator,
    ) -> Path:
        """Save a checkpoint of which each host keeps a part; return its directory on this host."""
        acts = spread.is_first
        number = self._common
        attempt_together(coordinator, purpose, lambda: self._prepare(staging, number) if acts else None)
        text: bytes = attempt_for_rank_zero(
            coordinator,
            purpose,
            lambda: self._write_part(staging, coordinator.rank, pieces),
            lambda parts: self._manifest(step, parts, state).to_json(),
        )
        manifest = Manifest.from_json(text)
        attempt_together(coordinator, purpose, lambda: spread.copy(staging, manifest) if acts else None)
        told = attempt_together(
            coordinator, purpose, lambda: self._commit(staging, manifest) if acts else None
        )
        target = told[spread.first]
        assert target is not None
        if acts:
            with contextlib.suppress(OSError):
                delete([path for path in checkpoints(staging.parent) if path != target], self.files)
        return target

    def close(self) -> None:
        """Give up the directories that this has claimed; a later save claims its own again."""
        for claiming in self._claiming.values():
            claiming.close()
        self._claiming, self._common = {}, 0

    def _begin(self, directory: Path, step: int) -> str:
        """Make a directory for a checkpoint; return its name, "" if it is not known yet whether one may."""
        if (writer := self._claim(directory)) is None:
            return ""
        staging = staging_path(directory, step, writer.number)
        self._prepare(staging, writer.number)
        return staging.name

    def _claim(self, directory: Path) -> Writer | None:
        if not directory.exists():
            self.files.make_directory(directory)
            self.files.sync_directory(directory.parent)
        return self._claiming.setdefault(directory, Claiming(directory, warnings.warn)).poll()

    def _claim_together(self, directory: Path, purpose: str, coordinator: Coordinator, *, acts: bool) -> int:
        """Claim each host's directory; return a number that is equal on all hosts, since names have it."""
        while not self._common:
            claims = attempt_together(coordinator, purpose, lambda: self._number(directory) if acts else 0)
            self._common = 0 if None in claims else max(number or 0 for number in claims)
        return self._common

    def _number(self, directory: Path) -> int | None:
        writer = self._claim(directory)
        return None if writer is None else writer.number

    def _prepare(self, staging: Path, number: int) -> None:
        writer = self._claiming[staging.parent].made
        assert writer is not None
        if staging.name in writer.begun:
            raise CheckpointError("another save of this process writes the same step there")
        sweep(staging.parent, self.files, number, writer.begun)
        writer.begun.add(staging.name)
        self._begun = writer, staging.name
        self.files.make_directory(staging)

    def _note_end(self) -> None:
        """Note that what this has begun is complete, or removed."""
        if self._begun is not None:
            writer, name = self._begun
            writer.begun.discard(name)
            self._begun = None

    def _write_part(self, staging: Path, rank: int, pieces: Sequence[Piece]) -> Part:
        names = f"rank-{rank:05d}.safetensors", _constant_name(rank)
        tensors = describe([(names[piece.is_constant], piece) for piece in pieces])
        changing = Shard([piece for piece in pieces if not piece.is_constant], self._values)
        constant = Shard([piece for piece in pieces if piece.is_constant], self._values)
        if (changing.pieces or constant.pieces) and not staging.is_dir():
            raise CheckpointError(
                f"{staging}, which rank 0 made, is missing on this rank: all ranks must see the same file "
                "system"
            )
        self._files = {}
        if changing.pieces:
            self._files[names[0]] = changing.write(staging / names[0], self.files, self._chunks)
        if constant.pieces:
            path = staging / names[1]
            linked = self._link(constant, path)
            self._files[names[1]] = linked or constant.write(path, self.files, self._chunks)
        is_known, self._told = tensors == self._told, tensors
        return Part(self._files, None if is_known else tensors)

    def _link(self, shard: Shard, path: Path) -> FileRecord | None:
        """Make `path` a link to the file that has the shard already; None if there is none."""
        before = self._constant
        if before is None or before.record.size != shard.size or not before.is_unchanged():
            return None
        if before.record != shard.record():
            return None
        try:
            self.files.link(before.path, path)
        except OSError:  # this file system has no links, or the file has as many as it can have
            return None
        return before.record

    def _manifest(self, step: int, parts: Sequence[Part], state: Mapping[str, Any]) -> Manifest:
        if any(part.tensors is not None for part in parts):
            known = self._known or [{} for _ in parts]
            self._known = [
                before if part.tensors is None else part.tensors
                for before, part in zip(known, parts, strict=True)
            ]
            self._merged = merge(self._known)
        files = {name: file for part in parts for name, file in part.files.items()}
        return Manifest(step, files, self._merged, state)

    def _commit(self, staging: Path, manifest: Manifest) -> Path:
        writer = self._claiming[staging.parent].made
        assert writer is not None
        return commit(staging, manifest.to_json(), manifest.step, writer, self.files)


def commit(staging: Path, manifest: bytes, step: int, writer: Writer, files: FileSystem = REAL_FILES) -> Path:
    """Complete a checkpoint, whose other files are on the disk; return its directory.

    Args:
        staging: Where it was written.
        manifest: The bytes of its manifest.
        step: Its step.
        writer: The claim on the directory of checkpoints.
        files: The FileSystem to write to.

    Raises:
        RunError: Another process has claimed the directory since.
        OSError: The disk is full, or fails otherwise.
    """
    write_file(staging / MANIFEST_NAME, iter([memoryview(manifest)]), files)
    files.sync_directory(staging)
    target = free_path(staging.parent, step)
    writer.require_newest()
    files.rename(staging, target)
    files.sync_directory(target.parent)
    return target


@dataclass(frozen=True, slots=True)
class Ended:
    """A save that has ended.

    Attributes:
        step: The step that was saved.
        path: The checkpoint, complete; None if it could not be saved.
        error: Why it could not be saved; None if it was.
        warnings: One line for each fault that cost nothing but space, such as an old checkpoint that could
            not be deleted.
        seconds: Seconds from the copy to the end.
    """

    step: int
    path: Path | None
    error: CheckpointError | None
    warnings: Sequence[str]
    seconds: float


@final
class Background:
    """Save checkpoints in a thread beside the training, one at a time; all ranks call `begin` together.

    The training's thread calls all methods here. Between `begin` and the end of the save the thread of the
    save owns the copies of the pieces, the Saver and the Coordinator; the training touches none of them.

    Args:
        saver: Saves them.
        coordinator: The ranks, for this alone: no other thread uses it.
    """

    def __init__(self, saver: Saver, coordinator: Coordinator) -> None:
        self._saver = saver
        self._coordinator = coordinator
        self._thread: threading.Thread | None = None
        self._ended: Ended | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save goes on."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self, directory: Path, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], keep: int = 0
    ) -> None:
        """Begin to save a checkpoint, when the one before has ended.

        Args:
            directory: See `save`.
            step: See `save`.
            pieces: Copies of this rank's pieces, which nobody else changes until the save has ended.
            state: See `save`; a copy is made.
            keep: See `Saver.save`.
        """
        assert self._thread is None, "the result of the save before was taken"
        self.give_up_after(math.inf)
        work = directory, step, pieces, copy.deepcopy(dict(state)), keep
        # A daemon: a process that fails does not wait for ranks that are gone.
        run = on_callers_device(self._run)
        self._thread = threading.Thread(target=run, args=work, name="shoal save", daemon=True)
        self._thread.start()

    def take(self) -> Ended | None:
        """Return the save that has ended since the last call; None if there is none, or it goes on."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        ended, self._ended = self._ended, None
        return ended

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the save has ended, if one goes on; at most so many seconds, if they are given."""
        if self._thread is not None:
            self._thread.join(seconds)

    def give_up_after(self, seconds: float) -> None:
        """Let the save fail if this rank, once its own part is written, waits so long for another."""
        if isinstance(self._coordinator, StoreCoordinator):
            self._coordinator.give_up_after(seconds)

    def _run(
        self, directory: Path, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], keep: int
    ) -> None:
        began = time.perf_counter()
        path, failure, warnings = None, None, list[str]()
        try:
            path = self._saver.save(directory, step, pieces, state, self._coordinator, keep, warnings.append)
        except CheckpointError as error:
            failure = error
        except Exception as error:
            failure = CheckpointError(f"cannot save step {step} in {directory}: {error!r}")
            failure.__cause__ = error
        self._ended = Ended(step, path, failure, warnings, time.perf_counter() - began)


def _constant_name(rank: int) -> str:
    return f"rank-{rank:05d}-constant.safetensors"
