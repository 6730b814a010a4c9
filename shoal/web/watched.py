"""A run as the pages read it: files that may still grow, read in small pieces and kept."""

from __future__ import annotations

import threading
import time
from functools import cached_property
from pathlib import Path

from shoal.errors import UserError
from shoal.run import Run
from shoal.simulate import Prediction, mark_bubbles, recorded_cluster
from shoal.timeline import Breakdown, Timeline, explain
from shoal.web.metrics_tail import MetricsTail
from shoal.web.timeline_files import TimelineFiles

__all__ = ["Watched"]

_SPANS = 20_000
"""Spans that one explanation takes: with 64 ranks of 60 spans a step, the newest five steps."""
_STEPS = 30


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
        self._recent: tuple[Timeline, Breakdown | None] = (Timeline([]), None)
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
        has_metrics = self.metrics.refresh()
        if has_spans := self.files.refresh():
            timeline = mark_bubbles(self.files.newest(_STEPS, _SPANS))
            self._recent = timeline, explain(timeline) if timeline.steps() else None
        return has_metrics or has_spans

    @property
    def recent(self) -> tuple[Timeline, Breakdown | None]:
        """The newest steps that all ranks finished, and where their time went; None without steps."""
        return self._recent

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
