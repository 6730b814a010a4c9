"""The values of a run that are compared with another run's: step by step, and once for its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shoal.run import Run
from shoal.simulate import measured_timeline
from shoal.timeline.series import collective_series, kind_series, step_starts

WARM_UP_STEPS = 2
"""Steps of a run that are left out: caches fill, kernels are chosen, memory is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValues:
    """The values of one run, without its first steps.

    Attributes:
        path: Directory of the run.
        plan: Its Plan; "" if it does not say.
        ranks: Number of its ranks; 0 if it does not say.
        starts: When the steps of the timeline began, in seconds on the wall clock, in order of time.
        kinds: Seconds of steps by kind, in order of time; empty without a timeline.
        collectives: Seconds of steps by collective, in order of time.
        tokens_per_second: Tokens/s of steps, in order of time.
        memory: The peak of the rank that holds most, in bytes; None if it was not measured.
    """

    path: str
    plan: str
    ranks: int
    starts: tuple[float, ...] = ()
    kinds: Mapping[str, tuple[float, ...]]
    collectives: Mapping[str, tuple[float, ...]]
    tokens_per_second: tuple[float, ...]
    memory: int | None

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return the values of the steps under the run's present Plan.

        Raises:
            ShoalError: A file of the run is malformed.
        """
        described = run.description
        timeline = measured_timeline(run)
        has_steps = bool(timeline.steps())
        since = described.get("since_step") or 0
        rates = {
            values["step"]: values["tokens_per_second"]
            for values in run.metrics()
            if "tokens_per_second" in values and values["step"] >= since
        }
        peaks = [each.peak for each in run.memory()]
        return cls(
            path=str(run.path),
            plan=described.get("plan") or "",
            ranks=described.get("world_size") or 0,
            starts=_after_warm_up(step_starts(timeline)),
            kinds=_in_order(kind_series(timeline)) if has_steps else {},
            collectives=_in_order(collective_series(timeline)) if has_steps else {},
            tokens_per_second=_after_warm_up(rates),
            memory=max(peaks) if peaks else None,
        )


def _in_order(series: Mapping[str, Mapping[int, float]]) -> dict[str, tuple[float, ...]]:
    return {name: _after_warm_up(values) for name, values in series.items()}


def _after_warm_up(by_step: Mapping[int, Any]) -> tuple[float, ...]:
    return tuple(by_step[step] for step in sorted(by_step))[WARM_UP_STEPS:]
