"""A run as the pages read it: files that may still grow, read in small pieces and kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.cost.outlook import account_summary
from shoal.diagnosis import POLICY, Verdict, told_by, verdict
from shoal.errors import ShoalError, UserError
from shoal.run import FollowedAccount, Run
from shoal.simulate import Prediction, kinds_compared, mark_bubbles, recorded_cluster
from shoal.timeline import Breakdown, Timeline, explain
from shoal.web.metrics_tail import MetricsTail
from shoal.web.timeline_files import TimelineFiles

__all__ = ["Watched"]

_SPANS = 40_000
"""Spans that one explanation takes: with 64 ranks of 20 spans a step, the newest 30 steps."""
_STEPS = 30
_SHARE = 0.25  # of the time that explanations may take, so that a core is left to the training


class Watched:
    """One run.

    Args:
        run: The run.

    Attributes:
        run: The run.
        metrics: Its metrics.
        files: Its timeline.
        lock: Held by whoever reads.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics = MetricsTail(run.metrics_file)
        self.files = TimelineFiles(run.timeline)
        self.lock = threading.RLock()
        self._account = FollowedAccount(run)
        self._recent: tuple[Timeline, Breakdown | None] = (Timeline([]), None)
        self._verdict: Verdict | None = None
        self._compared: list[dict[str, Any]] | None = None
        self._explain_at = 0.0
        self._is_behind = False
        self._trouble: ShoalError | None = None
        self._described: int = 0

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.run.path.resolve().name

    def refresh(self) -> bool:
        """Read what was appended; return whether there was anything.

        Raises:
            ShoalError: A file of the run is malformed.
        """
        described = _modified(self.run.path / "run.json")
        if described != self._described:  # a run that is resumed describes itself anew
            self._described = described
            self.run.__dict__.pop("description", None)
            self.__dict__.pop("prediction", None)
            self.__dict__.pop("_predicted", None)
        has_metrics = self.metrics.refresh()
        has_spans = self.files.refresh()
        self._is_behind |= has_spans
        if self._is_due:
            self._explain()
        if self._trouble is not None:
            raise self._trouble
        return has_metrics or has_spans

    def _explain(self) -> None:
        begun = time.monotonic()
        self._is_behind, self._trouble, self._compared = False, None, None
        try:
            timeline = mark_bubbles(self.files.newest(_STEPS, _SPANS))
            steps = timeline.steps()
            self._recent = timeline, explain(timeline) if steps else None
            prediction = self.prediction if isinstance(self.prediction, Prediction) else None
            told = told_by(prediction)
            self._verdict = verdict(timeline, first=max(steps[0], POLICY.warm_up), **told) if steps else None
        except ShoalError as error:  # told at each refresh, until the file grows
            self._trouble = error
        ended = time.monotonic()
        self._explain_at = ended + (ended - begun) * (1 / _SHARE - 1)

    @property
    def recent(self) -> tuple[Timeline, Breakdown | None]:
        """The newest steps that all ranks finished, and where their time went; None without steps."""
        return self._recent

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the newest steps; None without steps."""
        return self._verdict

    @property
    def compared(self) -> list[dict[str, Any]] | None:
        """Predicted and measured seconds of the newest steps, by kind of span; None without steps."""
        timeline, _ = self._recent
        if self._compared is None and timeline.steps():
            self._compared = kinds_compared(self._predicted, timeline)
        return self._compared

    @cached_property
    def _predicted(self) -> Mapping[str, float]:
        assert isinstance(self.prediction, Prediction)
        return self.prediction.seconds_by_kind()

    @property
    def account(self) -> dict[str, Any] | None:
        """Where the wall clock of the run went, and what it costs; None if the run has no events."""
        try:
            cluster = recorded_cluster(self.run)
        except ShoalError:  # the prediction tells of it
            cluster = None
        return account_summary(self._account.look(), self.run.description, cluster)

    @property
    def is_behind(self) -> bool:
        """Whether a refresh would read or explain more, though no file has grown."""
        return self._is_due or self.metrics.is_sample

    @property
    def _is_due(self) -> bool:
        return self._is_behind and time.monotonic() >= self._explain_at

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

    def age(self) -> float:
        """Return the seconds since a file of the run was written."""
        newest = max(_modified(self.run.metrics_file), _modified(self.run.timeline_file(0)), self._described)
        return max(0.0, time.time() - newest / 1e9)


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
