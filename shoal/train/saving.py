"""When a run saves, and what it says of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, final

from shoal.checkpoint import Coordinator, Ended, retain
from shoal.cost.outlook import best_interval, seconds_between_failures
from shoal.errors import CheckpointError
from shoal.run import Account
from shoal.train.config import CheckpointConfig
from shoal.train.trainer import Trainer
from shoal.units import format_seconds

__all__ = ["Saving", "is_due"]

_FIRST = 10  # steps before the first save with every = "auto", which measures
_LAST_STEPS, _LAST_SAVES = 50, 5  # steps and saves whose median counts
_CHANGE = 0.2  # share by which an interval changes before it is told again
_LONG_WAIT = 0.1  # seconds of waiting for the save before that are told
_HOUR = 3600.0


@final
class Saving:
    """Save a run while it trains and at its end; all ranks call each method together, but `stepped`.

    Args:
        trainer: The Trainer.
        config: When to save, and how.
        directory: The directory of checkpoints.
        extra: A JSON object to keep with each checkpoint.
        coordinator: All ranks.
        say: Told of everything that a person should know, in one line.
        account: Returns the account of the run so far on the rank that has it, else None.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: CheckpointConfig,
        directory: Path,
        extra: Mapping[str, Any],
        coordinator: Coordinator,
        say: Callable[[str], object],
        account: Callable[[], Account | None] = lambda: None,
    ) -> None:
        self._trainer = trainer
        self._config = config
        # A copy of state that is in files would take the memory that they save.
        self._is_beside = config.background and not trainer.plan.tiers.has_files
        self._directory = directory
        self._extra = extra
        self._coordinator = coordinator
        self._say = say
        self._account = account
        self._saved_at = 0  # the step of the last save, or at which the run began
        self._interval = _FIRST if config.every == "auto" else config.every
        self._told_interval = 0
        self._steps: deque[float] = deque(maxlen=_LAST_STEPS)
        self._behind = 0.0  # seconds that the last save beside the training took
        self._stalls: list[float] = []
        self._begun = self._failed = 0
        self._newest: tuple[int, Path] | None = None  # the newest checkpoint that is complete, and its step

    def begin(self, loaded: Path | None) -> None:
        """Begin to count steps: the run begins, or goes on from a checkpoint."""
        self._saved_at = self._trainer.step_count
        if loaded is not None and loaded.parent == self._directory:
            self._newest = self._saved_at, loaded

    def prepare(self) -> None:
        """Make room for the saves to come, once a step was made, if this rank's worker saves."""
        every = self._config.every
        is_periodic = every == "auto" or 0 < every < self._trainer.steps
        if is_periodic and self._is_beside and self._trainer.exchange.leads:
            self._trainer.saves.prepare()

    def stepped(self, seconds: float) -> None:
        """Take note of the time of a step."""
        self._steps.append(seconds)

    def save_if_due(self, before: int) -> bool:
        """Save, if a checkpoint is due; a failure is told, and training goes on. Return whether it was due.

        Args:
            before: The step after which this was asked last.
        """
        step = self._trainer.step_count
        if self._config.every == "auto":
            if step - self._saved_at < self._interval:
                return False
        elif not is_due(before, step, self._config.every):
            return False
        self._saved_at = step
        self._begun += 1
        try:
            stalled = self._save_in_background() if self._is_beside else self._save_in_step()
        except CheckpointError as error:
            self._note_failure(step, error)
            return True
        self._stalls.append(stalled)
        if self._config.every == "auto":
            self._choose_interval()
        return True

    def save_at_end(self) -> Path:
        """Save while nothing else goes on, once the save before has ended; return the step's checkpoint.

        Raises:
            CheckpointError: It could not be written.
        """
        began = time.perf_counter()
        self._trainer.finish_saving()
        self._tell_wait(time.perf_counter() - began)
        step = self._trainer.step_count
        if self._newest is None or self._newest[0] != step:
            self._newest = step, self._trainer.save(self._directory, self._extra)
            self._retain(self._newest[1])
        return self._newest[1]

    def summary(self) -> str:
        """Return what became of the checkpoints during the training; "" if there were none."""
        if not self._begun:
            return ""
        longest, stalled = (
            format_seconds(each) for each in (max(self._stalls, default=0), sum(self._stalls))
        )
        failed = f"; {self._failed} failed" if self._failed else ""
        return f"{self._begun} during training, which waited {stalled} in all, {longest} at most{failed}"

    def _save_in_background(self) -> float:
        """Begin to save; return the seconds for which training waited."""
        begun = self._trainer.save_in_background(
            self._directory, self._extra, keep=self._config.keep, told=self._ended
        )
        self._tell_wait(begun.waited)
        if begun.in_step:
            waited = format_seconds(begun.stalled)
            self._say(f"step {self._saved_at}: training waited {waited} for the save: {begun.in_step}")
        return begun.stalled

    def _save_in_step(self) -> float:
        """Save, and return the seconds that it took."""
        began = time.perf_counter()
        self._retain(self._trainer.save(self._directory, self._extra))
        return time.perf_counter() - began

    def _retain(self, path: Path) -> None:
        """Delete old checkpoints, after `path` was saved."""
        try:
            retain(self._directory, self._config.keep, self._coordinator, self._say, sound=path)
        except CheckpointError as error:
            self._say(f"warning: {error}")

    def _ended(self, ended: Ended) -> None:
        self._behind = ended.seconds
        if ended.path is not None:
            self._newest = ended.step, ended.path
        for warning in ended.warnings:
            self._say(f"warning: {warning}")
        if ended.error is not None:
            self._note_failure(ended.step, ended.error)

    def _note_failure(self, step: int, error: CheckpointError) -> None:
        self._failed += 1
        self._say(f"warning: step {step} was not saved, training goes on: {error}")

    def _tell_wait(self, seconds: float) -> None:
        if seconds > _LONG_WAIT:
            step = self._trainer.step_count
            self._say(f"step {step}: training waited {format_seconds(seconds)} for the save before to end")

    def _choose_interval(self) -> None:
        """Choose the steps until the next save, alike on all ranks."""
        account = self._account()
        seen = (0, 0.0) if account is None else (account.failures, account.running)
        recent = median(self._stalls[-_LAST_SAVES:]), median(self._steps), self._behind, *seen
        told = self._coordinator.all_gather_object(recent)
        stalled, step, behind, failures, running = map(max, zip(*told, strict=True))
        expected = self._config.mtbf * _HOUR
        between = seconds_between_failures(expected, int(failures), running)
        best = best_interval(stalled, between)
        self._interval = max(1, round(max(best, behind) / step))
        if abs(self._interval - self._told_interval) <= _CHANGE * self._told_interval:
            return
        self._told_interval = self._interval
        least = f", but writing takes {format_seconds(behind)}" if behind > best else ""
        self._say(
            f"a checkpoint every {self._interval} steps of {format_seconds(step)}: training waits "
            f"{format_seconds(stalled)} for one and fails every {format_seconds(between)} (expected "
            f"{format_seconds(expected)}, seen {failures:.0f} in {format_seconds(running)}), for which "
            f"{format_seconds(best)} is best{least}"
        )


def is_due(before: int, step: int, every: int) -> bool:
    """Return whether a multiple of `every` is among the steps after `before`, up to `step`."""
    return every > 0 and step // every > before // every
