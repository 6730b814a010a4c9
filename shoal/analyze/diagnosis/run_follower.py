"""Follows a run on disk: the newest values of its files and the verdict, for `shoal watch` and the pages.

Files may still grow. They are read in small pieces, and only what was appended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, final

from shoal.analyze.diagnosis.verdict import verdict
from shoal.errors import ShoalError, UserError
from shoal.predict.cost.outlook import account_summary
from shoal.predict.simulate import Prediction, kinds_compared, mark_bubbles, recorded_cluster
from shoal.spec.run import Account, FollowedAccount, Run
from shoal.spec.run.metrics_tail import MetricsTail
from shoal.spec.run.timeline_files import Malformed, TimelineFiles
from shoal.spec.run.writer import is_written
from shoal.spec.timeline import Breakdown, Timeline, explain


class Told(TypedDict):
    """Arguments of `verdict` that no timeline has; None where there is no model."""

    memory_share: float | None
    predicted: Mapping[str, float] | None


def told_by(prediction: Prediction | None) -> Told:
    """Return what a prediction of the run tells: what bounds compute, and how long transfers should take."""
    if prediction is None:
        return Told(memory_share=None, predicted=None)
    return Told(memory_share=prediction.memory_share, predicted=prediction.transfer_seconds)


_PACES = 50
"""Newest steps whose mean duration gives the time that is left."""
_QUIET = 60.0
"""Seconds without news after which a run is said to be quiet."""
_QUIET_AT_END, _OVER = 10.0, 300.0
"""Seconds without news after which a run without a lock has ended: after its last step, before it."""
_LONGEST_REST = 10.0
"""Most seconds between two verdicts on spans that are still coming."""


@final
class RunFollower:
    """Follow the files of a run.

    Args:
        run: The run.
        steps: Newest steps to explain.
        spans: Most spans of these, over all ranks; three steps are explained at least.
        rest: Times of an explanation for which the next one waits, up to 10 s: ranks need the cores.

    Attributes:
        run: The run.
        metrics: Its metrics.
        files: Its timeline.
        lock: Held by whoever reads.
        account: Where the wall clock of the run went; None if it has no events.
        alive: Whether a process works on the run; None if that is not known.
        timeline: The newest steps that all ranks finished.
        breakdown: Where their time went; None without a finished step.
        verdict: What bounds them, and who is late; it may say that it knows too little.
    """

    def __init__(self, run: Run, *, steps: int = 30, spans: int = 40_000, rest: float = 3.0) -> None:
        self.run = run
        self.metrics = MetricsTail(run.metrics_file)
        self.files = TimelineFiles(run.timeline)
        self.lock = threading.RLock()
        self.account: Account | None = None
        self.alive: bool | None = None
        self.timeline = Timeline([])
        self.breakdown: Breakdown | None = None
        self.verdict = verdict(self.timeline)
        self._events = FollowedAccount(run)
        self._steps, self._spans, self._rest = steps, spans, rest
        self._compared: list[dict[str, Any]] | None = None
        self._malformed: Malformed = {}
        self._trouble: ShoalError | None = None
        self._rests_until = 0.0
        self._has_new_spans = False
        self._described = 0

    def refresh(self) -> None:
        """Read what was appended. All that can be read is read, also if an error is raised.

        Raises:
            ShoalError: A file of the run is malformed.
        """
        described = _modified(self.run.path / "run.json")
        if described != self._described:  # a run that is resumed describes itself anew
            self._described = described
            self.run.__dict__.pop("description", None)
            self.__dict__.pop("prediction", None)
            self.__dict__.pop("_predicted", None)
        self.account = self._events.look()
        self.metrics.refresh()
        self._has_new_spans |= self.files.refresh()
        self.alive = is_written(self.run.checkpoints)
        if self._is_due:
            self._explain()
        for error in (*self.files.unreadable, self._trouble):
            if error is not None:
                raise error

    def _explain(self) -> None:
        begun = time.monotonic()
        self._has_new_spans, self._trouble, self._compared = False, None, None
        malformed: Malformed = {}
        try:
            self.timeline = mark_bubbles(self.files.newest(self._steps, self._spans, malformed))
            self.breakdown = explain(self.timeline) if self.timeline.steps() else None
            self.verdict = verdict(self.timeline, **self._told())
        except ShoalError as error:
            self._trouble = error
        if malformed:  # raised at each refresh, until the files grow
            self._trouble = next(iter(malformed.values()))
        self._malformed |= malformed
        ended = time.monotonic()
        self._rests_until = ended + min(self._rest * (ended - begun), _LONGEST_REST)

    @property
    def _is_due(self) -> bool:
        return self._has_new_spans and (time.monotonic() >= self._rests_until or self.alive is False)

    @property
    def is_behind(self) -> bool:
        """Whether a refresh would read or explain more, though no file has grown."""
        return self._is_due or self.metrics.is_sample

    def _told(self) -> Told:
        try:
            return told_by(self.prediction if isinstance(self.prediction, Prediction) else None)
        except (ShoalError, KeyError, TypeError, AttributeError, ValueError):
            return told_by(None)

    @property
    def description(self) -> Mapping[str, Any]:
        """The run's description."""
        return self.run.description

    @property
    def values(self) -> dict[str, float]:
        """The newest values of steps, by name, with "step"; empty before the first."""
        return self.metrics.values

    @property
    def steps(self) -> int | None:
        """The number of steps that the run is to make; None if it does not say."""
        found = (self.description.get("config") or {}).get("steps")
        return found if isinstance(found, int) else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step, at the present pace; None if that is not known."""
        paces = self.metrics.curve("step_seconds")[-_PACES:]
        if not paces or self.steps is None:
            return None
        return max(0, self.steps - self.values["step"]) * sum(paces) / len(paces)

    @property
    def seconds_quiet(self) -> float:
        """Seconds since a file of the run was written."""
        paths = [self.run.metrics_file, self.run.path / "run.json", *self.run.timeline.glob("rank-*.jsonl")]
        return max(0.0, time.time() - max(map(_modified, paths)) / 1e9)

    @property
    def is_done(self) -> bool:
        """Whether the run made its last step."""
        return self.steps is not None and self.values.get("step", 0) >= self.steps

    @property
    def has_ended(self) -> bool:
        """Whether no process works on the run; without a lock, whether it was quiet for long."""
        if self.alive is None:
            return self.seconds_quiet > (_QUIET_AT_END if self.is_done else _OVER)
        return not self.alive

    @property
    def state(self) -> str:
        """Whether the run goes on, in words."""
        if self.has_ended:
            return "ended after its last step" if self.is_done else "ended before its last step"
        if self.seconds_quiet > _QUIET:
            return f"no news for {self.seconds_quiet:.0f} s"
        return "running" if self.alive else "running, as far as can be seen"

    @property
    def shares(self) -> dict[str, float]:
        """The parts of the newest steps as shares of their time; empty without steps."""
        if self.breakdown is None:
            return {}
        parts = self.breakdown.parts
        return {name: seconds / parts.wall for name, seconds in parts.disjoint().items()}

    @property
    def unread(self) -> int:
        """The number of lines that could not be read."""
        return self.metrics.unreadable + len(self.files.unreadable) + len(self._malformed)

    @property
    def priced_account(self) -> dict[str, Any] | None:
        """The account as JSON has it, with what the run costs on the machines that it was given."""
        try:
            cluster = recorded_cluster(self.run)
        except ShoalError:  # the prediction tells of it
            cluster = None
        return account_summary(self.account, self.description, cluster)

    @property
    def compared(self) -> list[dict[str, Any]] | None:
        """Predicted and measured seconds of the newest steps, by kind of span; None without steps."""
        if self._compared is None and self.timeline.steps():
            self._compared = kinds_compared(self._predicted, self.timeline)
        return self._compared

    @cached_property
    def _predicted(self) -> Mapping[str, float]:
        assert isinstance(self.prediction, Prediction)
        return self.prediction.seconds_by_kind()

    @cached_property
    def prediction(self) -> Prediction | str:
        """The prediction of the run on the machines that it was given, or why there is none."""
        cluster = None
        try:
            cluster = recorded_cluster(self.run)
            if cluster is None:
                return "The run has no description of its machines: train with --cluster to predict its step."
            prediction = Prediction.of(self.run, cluster)
            prediction.simulation  # noqa: B018 the first use plays the steps
        except UserError as error:
            return f"Not predicted: {error.given}."
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return f"Not predicted: run.json does not say what a prediction needs ({error!r})."
        return prediction


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
