"""How long each stage of a pipeline works, measured from the actions that name its spans.

Together with the bubble this separates the two causes of idle time, the schedule and the split into stages: a
stage that works longer than the mean makes the others wait under any schedule.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from statistics import median

from shoal.errors import PlanError
from shoal.plan.schedules import Action, Work
from shoal.timeline import Kind, Timeline
from shoal.timeline.windows import StepWindows


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one stage, in seconds, as medians over its ranks; waits within an action count.

    Attributes:
        stage: Number of the stage in the whole pipeline, from 0.
        ranks: Ranks that hold the stage, ascending.
        forward: Seconds of a micro-batch's forward.
        backward: Seconds of a micro-batch's backward; None if it is always made in halves.
        input: Seconds of the half that gives the gradient of the stage's input; None if there is none.
        weight: Seconds of the half that gives the gradient of the stage's weights; None if there is none.
        step: Seconds of all these actions in a step.
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
    """Return the times of the stages, ascending; empty if no pipeline ran."""
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
