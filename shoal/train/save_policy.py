"""When a run saves, where, and what it says of it; and the checkpoint from which it goes on.

    the run's directory   every `checkpoint.every` steps, at a stop and at the end
    an object store       a copy of each of these, which a thread makes
    the hosts' memory     with `--nproc MIN:MAX`: every `checkpoint.memory` steps, and before the ranks change

Checkpoints in memory are ordinary ones in a folder of the memory file system, so any other Plan can load
them, and they outlive the process that wrote them. Where there are several hosts, each keeps a part; see
`peer_checkpoints.py`. If there is no room in memory, ranks that change go on from the run's directory.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, final

from shoal.checkpoint import (
    Coordinator,
    Ended,
    RealFiles,
    Saver,
    SingleProcess,
    Store,
    attempt_together,
    checkpoints,
    newest_sound,
    read_together,
    step_of,
)
from shoal.checkpoint.directory import delete
from shoal.errors import CheckpointError, CorruptCheckpointError, DataError, ModelError, RunError
from shoal.launch.elastic import PEER, Membership
from shoal.predict.cost.outlook import best_interval, seconds_between_failures
from shoal.spec.run import Account
from shoal.spec.run.writer import claimed
from shoal.train.checkpointer import has_room_for
from shoal.train.config import CheckpointConfig
from shoal.train.init_from import begin_from_first_values
from shoal.train.job import Resume
from shoal.train.peer_checkpoints import FOLDER, HostMemory
from shoal.train.trainer import Trainer
from shoal.units import format_seconds

_FIRST = 10  # steps before the first save on disk with every = "auto", which measures
_LAST_STEPS, _LAST_SAVES = 50, 5  # steps and saves whose median counts
_CHANGE = 0.2  # share by which an interval changes before it is told again
_LONG_WAIT = 0.1  # seconds of waiting for the save before that are told
_HOUR = 3600.0
_SHARE = 0.005  # of the time of steps that saves in memory may take with memory = "auto"
_WITHOUT_ROOM = 16  # steps at least until memory = "auto" tries again
_PATIENCE = 0.1  # seconds for other ranks' parts of a save after a rank was lost: others wait for this one


@dataclass(slots=True)
class _Place:
    """A directory that the run saves into, when, and what that costs.

    Attributes:
        directory: The directory of checkpoints.
        keep: Number of newest checkpoints that stay there; 0 if others than the policy see to that.
        copies: How often the memory of hosts holds each byte of a checkpoint; 0 on disk.
        is_automatic: Whether the interval is chosen by what saves cost.
        interval: Steps between two saves; 0 for none.
        saved_at: The step of the last save, or at which the run began.
        begun: Number of saves.
        newest: The newest checkpoint that is complete, and its step.
        stalls: Seconds for which training waited, of each save.
        behind: Seconds that the last save beside the training took.
        failed: Number of saves that failed.
        is_failing: Whether the last save failed.
    """

    directory: Path
    keep: int
    copies: int
    is_automatic: bool
    interval: int
    saved_at: float = 0
    begun: int = 0
    newest: tuple[int, Path] | None = None
    stalls: list[float] = field(default_factory=list)
    behind: float = 0.0
    failed: int = 0
    is_failing: bool = False


@final
class SavePolicy:
    """Save a run while it trains and at its end; all ranks call each method together, but `stepped`.

    Args:
        trainer: The Trainer.
        config: When to save, and how.
        directory: The run's directory of checkpoints.
        data: What has to be as it was when the run goes on, so that each sample is seen once an epoch.
        coordinator: All ranks.
        say: Told of everything that a person should know, in one line.
        account: Returns the account of the run so far on the rank that has it, else None.
        membership: This process's side of the ranks, if they may be lost and come.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: CheckpointConfig,
        directory: Path,
        data: Mapping[str, Any],
        coordinator: Coordinator,
        say: Callable[[str], object],
        account: Callable[[], Account | None] = lambda: None,
        membership: Membership | None = None,
    ) -> None:
        self._trainer = trainer
        self._config = config
        # A copy of state that is in files would take the memory that they save.
        self._is_beside = config.background and not trainer.plan.tiers.has_files
        self._data = data
        self._coordinator = coordinator
        self._say = say
        self._account = account
        self._membership = membership
        self._is_savable = False  # as far as known: an optimizer has no state before its first step
        self._steps: deque[float] = deque(maxlen=_LAST_STEPS)
        self._told_interval = 0
        every = _FIRST if config.every == "auto" else config.every
        self._disk = _Place(
            directory, keep=config.keep, copies=0, is_automatic=config.every == "auto", interval=every
        )
        self._uploads: Uploads | None = None
        self._hosts: HostMemory | None = None
        self._memory: _Place | None = None
        if membership is not None:
            trainer.checkpointer.patience = _PATIENCE
            if folder := os.environ.get(FOLDER):
                self._memory = self._place_in_memory(Path(folder), membership)

    def _place_in_memory(self, folder: Path, membership: Membership) -> _Place:
        """Return the place in the hosts' memory: a rank that comes needs the room of older checkpoints."""
        is_automatic = self._config.memory == "auto"
        every = 1 if self._config.memory == "auto" else self._config.memory
        place = _Place(folder, keep=1, copies=1, is_automatic=is_automatic, interval=every)
        place.saved_at = -math.inf  # the first step is saved
        if PEER in os.environ:
            self._hosts = HostMemory(folder, self._coordinator, membership.peers())
            self._trainer.state.spread = self._hosts
            if self._hosts.has_neighbours:  # each keeps a copy of the next one's files, and the newest alone
                self._trainer.checkpointer.spread(self._hosts)
                place.keep, place.copies = 0, 2
        return place

    def stepped(self, seconds: float, *, is_made: bool) -> None:
        """Take note of the time of a step; after the first one that was made, get ready to save.

        Raises:
            CheckpointError: The optimizer has state that a checkpoint cannot hold.
        """
        self._steps.append(seconds)
        if self._is_savable or not is_made:
            return
        self._trainer.state.require_savable()
        is_periodic = self._disk.is_automatic or 0 < self._disk.interval < self._trainer.steps
        if is_periodic and self._is_beside and self._trainer.exchange.leads:
            self._trainer.checkpointer.prepare()
        self._is_savable = True

    def save_if_due(self, before: int) -> None:
        """Save, if a checkpoint is due; before the end a failure is told, and training goes on.

        Args:
            before: The step after which this was asked last.

        Raises:
            CheckpointError: At the end: it could not be written.
        """
        if self._trainer.step_count == self._trainer.steps:
            self.save_at_end()
        elif self._is_due(self._disk, before):
            self._save(self._disk)
        elif self._memory is not None and self._is_due(self._memory, before):
            self._save(self._memory)

    def save_at_end(self) -> Path:
        """Save while nothing else goes on, once the save before has ended; return the step's checkpoint.

        Raises:
            CheckpointError: It could not be written.
        """
        began = time.perf_counter()
        self._trainer.finish_saving()
        self._tell_wait(time.perf_counter() - began)
        newest = self._disk.newest
        return newest[1] if newest and newest[0] == self._trainer.step_count else self._save_now(self._disk)

    def save_for_others(self) -> None:
        """Save before the ranks change, in memory if there is room; all ranks go on from this.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._memory is not None:
            try:
                self._save_now(self._memory)
                return
            except CheckpointError as error:
                self._note_failure(self._memory, self._trainer.step_count, error)
        self.save_at_end()
        if self._coordinator.rank == 0:
            self._empty_memory()

    def save_replica(self, seconds: float) -> None:
        """Save the last step's state, if this rank has all of it and is the first of those that stay.

        Args:
            seconds: Time in which the launcher notes that another rank is lost.

        Raises:
            CheckpointError: It could not be written.
        """
        plan = self._trainer.plan
        is_whole = plan.dp == plan.ranks and plan.shard == "none" and plan.exchange in ("bucketed", "naive")
        if self._membership is None or not is_whole or not self._is_savable:
            return
        if not self._membership.leads_next(seconds):
            return
        _, step, state = self._trainer.to_save(self._disk.directory, self._extra)
        pieces, kept = self._trainer.state.replica_to_save(state)
        place = self._memory if self._memory is not None and has_room_for(pieces) else self._disk
        Saver().save(place.directory, step, pieces, kept, SingleProcess(), place.keep, self._warn)
        if place is self._disk:
            self._empty_memory()

    def resume(self, resume: Resume) -> Path | None:
        """Load the named checkpoint, or the newest sound one on disk or in memory.

        Returns:
            The checkpoint that was loaded; None if none is sound.

        Raises:
            DataError: It was saved in a training on other data.
            ModelError: It does not fit the model.
            CorruptCheckpointError: The named checkpoint is corrupt.
        """
        path = resume.checkpoint
        if path is None:
            path = self._load_newest(resume.run.checkpoints)
        else:
            self._load(path)
        self._disk.saved_at = step = self._trainer.step_count
        if path is not None and path.parent == self._disk.directory:
            self._disk.newest = step, path
        return path

    def upload(self, checkpoint: Path) -> None:
        """Copy a checkpoint that is complete to the object store, if there is one; one rank calls this."""
        if self._config.store and checkpoint.parent == self._disk.directory:
            self._uploads = self._uploads or Uploads(self._config, self._say)
            self._uploads.add(checkpoint)

    def close(self) -> None:
        """Wait for the last copy to the object store, if there is one."""
        if self._uploads is not None:
            self._uploads.close()

    def summary(self) -> str:
        """Return what became of the checkpoints during the training; "" if there were none."""
        disk = self._disk
        if not disk.begun:
            return ""
        longest, stalled = format_seconds(max(disk.stalls, default=0)), format_seconds(sum(disk.stalls))
        failed = f"; {disk.failed} failed" if disk.failed else ""
        return f"{disk.begun} during training, which waited {stalled} in all, {longest} at most{failed}"

    @property
    def _extra(self) -> dict[str, Any]:
        """A JSON object to keep with each checkpoint."""
        return {"data": self._data}

    def _is_due(self, place: _Place, before: int) -> bool:
        step = self._trainer.step_count
        if place is self._disk and not place.is_automatic:
            return is_due(before, step, place.interval)
        return 0 < place.interval <= step - place.saved_at

    def _save(self, place: _Place) -> None:
        """Save, beside the training if that is possible, and choose when to save next."""
        place.saved_at = step = self._trainer.step_count
        place.begun += 1
        began = time.perf_counter()
        try:
            if self._is_beside or place is self._memory:
                stalled = self._begin(place)
            else:
                self._save_now(place)
                stalled = time.perf_counter() - began
        except CheckpointError as error:
            self._note_failure(place, step, error)
            if place is self._memory and place.is_automatic:
                place.interval = max(place.interval, _WITHOUT_ROOM)
            return
        place.stalls.append(stalled)
        if place.is_automatic:
            choose = self._choose_interval_in_memory if place is self._memory else self._choose_interval
            choose(place)

    def _begin(self, place: _Place) -> float:
        """Begin to save beside the training; return the seconds for which it waited."""
        given = self._trainer.to_save(place.directory, self._extra)
        begun = self._trainer.checkpointer.begin(
            *given, keep=place.keep, in_memory=place.copies, told=partial(self._ended, place)
        )
        if place is self._disk:
            self._tell_wait(begun.waited)
            if begun.in_step:
                waited = format_seconds(begun.stalled)
                self._say(f"step {given[1]}: training waited {waited} for the save: {begun.in_step}")
        return begun.stalled

    def _save_now(self, place: _Place) -> Path:
        """Save while training waits."""
        given = self._trainer.to_save(place.directory, self._extra)
        path = self._trainer.checkpointer.save(
            *given, keep=place.keep, in_memory=place.copies, say=self._warn
        )
        place.newest = self._trainer.step_count, path
        return path

    def _ended(self, place: _Place, ended: Ended) -> None:
        """Take note of the end of a save that was begun."""
        place.behind = ended.seconds
        for warning in ended.warnings:
            self._warn(warning)
        if ended.error is not None:
            self._note_failure(place, ended.step, ended.error)
        elif ended.path is not None:
            place.newest, place.is_failing = (ended.step, ended.path), False

    def _note_failure(self, place: _Place, step: int, error: CheckpointError) -> None:
        """Tell of a save that failed; in memory, of the first one in a row."""
        if place is self._disk:
            self._warn(f"step {step} was not saved, training goes on: {error}")
        elif not place.is_failing:
            self._warn(f"step {step} was not saved in memory: {error}")
        place.failed, place.is_failing = place.failed + 1, True

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}")

    def _tell_wait(self, seconds: float) -> None:
        if seconds > _LONG_WAIT:
            step = self._trainer.step_count
            self._say(f"step {step}: training waited {format_seconds(seconds)} for the save before to end")

    def _choose_interval(self, disk: _Place) -> None:
        """Choose the steps until the next save on disk, alike on all ranks."""
        account = self._account()
        seen = (0, 0.0) if account is None else (account.failures, account.running)
        stalled, step, behind, failures, running = self._measured(disk, *seen)
        expected = self._config.mtbf * _HOUR
        between = seconds_between_failures(expected, int(failures), running)
        best = best_interval(stalled, between)
        disk.interval = max(1, round(max(best, behind) / step))
        if abs(disk.interval - self._told_interval) <= _CHANGE * self._told_interval:
            return
        self._told_interval = disk.interval
        least = f", but writing takes {format_seconds(behind)}" if behind > best else ""
        self._say(
            f"a checkpoint every {disk.interval} steps of {format_seconds(step)}: training waits "
            f"{format_seconds(stalled)} for one and fails every {format_seconds(between)} (expected "
            f"{format_seconds(expected)}, seen {failures:.0f} in {format_seconds(running)}), for which "
            f"{format_seconds(best)} is best{least}"
        )

    def _choose_interval_in_memory(self, memory: _Place) -> None:
        """Choose the steps until the next save in memory, alike on all ranks.

        Saves take 0.5 % of the time of steps: that for which steps wait, and on a CPU, where both share the
        cores, also that beside the steps.
        """
        stalled, step, behind = self._measured(memory)
        costs = stalled + behind if self._trainer.parallel.device.type == "cpu" else stalled
        memory.interval = max(1, math.ceil(max(costs / _SHARE, behind) / step))

    def _measured(self, place: _Place, *more: float) -> list[float]:
        """Return the most on any rank: of the times of a save and a step, and of further values."""
        mine = median(place.stalls[-_LAST_SAVES:]), median(self._steps), place.behind, *more
        return [max(each) for each in zip(*self._coordinator.all_gather_object(mine), strict=True)]

    def _empty_memory(self) -> None:
        """Delete what is in memory, after a save on disk: a rank that comes needs the room."""
        if self._memory is None or not self._memory.keep:
            return
        try:
            delete(checkpoints(self._memory.directory), RealFiles())
        except OSError as error:
            self._warn(f"older checkpoints stay in memory: {error}")

    def _load_newest(self, directory: Path) -> Path | None:
        """Load the newest sound checkpoint of a run, or of this one's memory; return it, if there is one."""

        def find() -> list[Path]:
            is_alone = self._memory is not None and self._hosts is None
            beside = checkpoints(self._memory.directory) if self._memory and is_alone else []
            return [*checkpoints(directory), *beside]

        found = attempt_together(self._coordinator, f"cannot list {directory}", find)[0]
        spread = {} if self._hosts is None else self._hosts.find()

        def load(path: Path) -> Path:
            if self._hosts is not None and path in spread:
                path = self._hosts.take(spread[path])
            self._load(path)
            return path

        candidates = sorted([*found, *spread], key=step_of, reverse=True)
        loaded = newest_sound(candidates, self._coordinator, self._say, load)
        if loaded is None:
            begin_from_first_values(self._trainer)
            return None
        return loaded[1]

    def _load(self, path: Path) -> None:
        saved = read_together(path, self._coordinator).state["data"]
        for name, value in self._data.items():
            if saved[name] != value:
                raise DataError(
                    f"the run to resume has {name}={saved[name]} for its data, and now {name}={value}",
                    possible="the same data, sequence and seed, so that no sample is skipped or repeated",
                    change="give the data of that run, or start a new run from its weights: init=RUN in "
                    "place of --resume",
                )
        try:
            self._trainer.load(path)
        except CorruptCheckpointError:
            raise
        except CheckpointError as error:
            raise ModelError(
                f"the model does not fit the state that is resumed: {error}",
                possible="the model and model_options of the run that saved it",
                change="give the model of that run, or start a new run",
            ) from error


@final
class Uploads:
    """Copy checkpoints to an object store in a thread, one at a time.

    Of those that are saved while one is copied, only the newest is copied after it. A failure is told, and
    training goes on.

    Args:
        config: The object store, and the number of newest checkpoints that stay there.
        say: Called with one line for each failure.

    Raises:
        ConfigError: The URL is of no kind that is known.
        MissingExtraError: The package for this kind of store is not installed.
    """

    def __init__(self, config: CheckpointConfig, say: Callable[[str], object]) -> None:
        self._store = Store(config.store)
        self._keep = config.keep
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="uploads")
        self._newest: Path | None = None

    def add(self, checkpoint: Path) -> None:
        """Copy a checkpoint that was just saved."""
        self._newest = checkpoint
        self._thread.submit(self._copy, checkpoint)

    def close(self) -> None:
        """Wait until the newest checkpoint is in the store, or has failed."""
        self._thread.shutdown(wait=True)

    def _copy(self, checkpoint: Path) -> None:
        if checkpoint != self._newest:
            return
        try:
            with claimed(checkpoint.parent) as writer:
                writer.read.add(checkpoint.name)  # or it, and each after it, might be deleted too soon
                try:
                    self._store.put(checkpoint, self._keep)
                finally:
                    writer.read.discard(checkpoint.name)
        except (CheckpointError, RunError) as error:
            self._say(
                f"warning: {checkpoint.name} was not copied to {self._store.url}, training goes on: {error}"
            )


def is_due(before: int, step: int, every: int) -> bool:
    """Return whether a multiple of `every` is among the steps after `before`, up to `step`."""
    return every > 0 and step // every > before // every
