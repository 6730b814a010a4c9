"""How long each stage of a pipeline works, read off the actions that its spans are named after.

Beside the bubble this is what tells a schedule from a split: stages that work longer than the mean make the
others wait, whatever the schedule.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from statistics import median

from shoal.errors import PlanError
from shoal.plan.schedules import Action, Work
from shoal.timeline import Kind, Timeline
from shoal.timeline.windows import StepWindows

__all__ = ["StageTimes", "stage_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage. Times in seconds, medians over its ranks; what blocks a rank within an action counts.

    Attributes:
        stage: Number of the stage in the whole pipeline, from 0.
        ranks: Those that hold it, ascending.
        forward: Of a micro-batch.
        backward: Of a micro-batch; None if it is always made in halves.
        input: The half that gives the gradient of the stage's input; None if there is none.
        weight: The half that gives the gradient of its weights; None if there is none.
        step: All of these in a step.
    """

    stage: int
    ranks: tuple[int, ...]
    forward: float | None
    backward: float | None
    input: float | None
    weight: float | None
    step: float


@dataclass(slots=True)
class _Measured:
    """The seconds of a stage's actions, by work, and of its steps, by rank and step."""

    by_work: dict[Work, list[float]] = field(default_factory=dict)
    by_step: dict[tuple[int, int], float] = field(default_factory=dict)


def stage_times(timeline: Timeline) -> tuple[StageTimes, ...]:
    """The stages, ascending; none where no pipeline ran."""
    stages: dict[int, _Measured] = {}
    for rank in timeline.ranks:
        windows = StepWindows(timeline, rank)
        for span in timeline.of(rank):
            step = windows.started_in(span) if span.kind in (Kind.FORWARD, Kind.BACKWARD) else None
            if step is None:
                continue
            with contextlib.suppress(PlanError):
                action = Action.parse(span.name)
                measured = stages.setdefault(action.stage, _Measured())
                measured.by_work.setdefault(action.work, []).append(span.duration)
                measured.by_step[rank, step] = measured.by_step.get((rank, step), 0.0) + span.duration
    return tuple(_times_of(stage, stages[stage]) for stage in sorted(stages))


def _times_of(stage: int, measured: _Measured) -> StageTimes:
    medians = {work: median(seconds) for work, seconds in measured.by_work.items()}
    return StageTimes(
        stage=stage,
        ranks=tuple(sorted({rank for rank, _ in measured.by_step})),
        forward=medians.get(Work.FORWARD),
        backward=medians.get(Work.BACKWARD),
        input=medians.get(Work.INPUT),
        weight=medians.get(Work.WEIGHT),
        step=median(measured.by_step.values()),
    )
