"""Split a pipeline's idle time: forced by its schedule, or caused by a slow stage or link.

The spans of a step's forwards and backwards have their actions as names, so the table that ran can be read
from the spans. It is played again with equal times for every stage: the means of the measured ones. In this
replay a rank is idle only because of the schedule. Measured idle time up to this amount is bubble; the rest
is waiting for a neighbour that is slower than the mean, or for a message.

How long each stage of a pipeline works, measured from the actions that name its spans.

Together with the bubble this separates the two causes of idle time, the schedule and the split into stages: a
stage that works longer than the mean makes the others wait under any schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from shoal.errors import PlanError
from shoal.spec.cluster import Cluster
from shoal.spec.plan.schedules import Action, Schedule, Times, Work, play, require_sound
from shoal.spec.run import Run
from shoal.spec.timeline import Kind, Lane, Span, Timeline
from shoal.spec.timeline.intervals import StepWindows

Row = Sequence[tuple[Action, float, float]]
"""A rank's actions in a step, in order, each with start and stop."""


def mark_bubbles(timeline: Timeline) -> Timeline:
    """Return the Timeline with bubble spans added: the gaps between actions that the schedule forced."""
    rows: dict[int, dict[int, Row]] = {}
    for rank in timeline.ranks:
        for step, row in _rows_of(timeline, rank):
            rows.setdefault(step, {})[rank] = row
    if not rows:
        return timeline
    pipelines = _pipelines(timeline)
    bubbles = [
        bubble
        for by_rank in rows.values()
        for ranks in pipelines
        if all(rank in by_rank for rank in ranks)
        for bubble in _bubbles({rank: by_rank[rank] for rank in ranks})
    ]
    return timeline.with_spans([*timeline.spans, *bubbles])


def _rows_of(timeline: Timeline, rank: int) -> Iterator[tuple[int, Row]]:
    """Yield, for each step of a rank that has pipeline actions, the step's index and its actions."""
    named = []
    for span in timeline.of(rank):
        if span.kind in (Kind.FORWARD, Kind.BACKWARD):
            with contextlib.suppress(PlanError):
                named.append((Action.parse(span.name), span.start, span.stop))
    for index in timeline.steps():
        step = timeline.step(rank, index)
        if step is None:
            continue
        row = [each for each in named if step.start <= each[1] < step.stop]
        if row:
            yield index, row


def _pipelines(timeline: Timeline) -> list[tuple[int, ...]]:
    """Return the ranks of each pipeline, in the order of the axis: those that send each other messages."""
    joined: dict[int, set[int]] = {}
    for span in timeline:
        if span.kind == Kind.COLLECTIVE and span.name.partition(":")[0] in ("activation", "gradient"):
            together = set[int]().union(*(joined.get(rank, {rank}) for rank in span.group))
            for rank in together:
                joined[rank] = together
    return sorted({tuple(sorted(ranks)) for ranks in joined.values()})


def _bubbles(rows: Mapping[int, Row]) -> Iterator[Span]:
    """Yield the bubble spans of one step of one pipeline, if all of its table was recorded."""
    schedule = _schedule_of([[action for action, _, _ in row] for row in rows.values()])
    if schedule is not None:
        yield from bubble_spans(schedule, rows)


def bubble_spans(schedule: Schedule, rows: Mapping[int, Row]) -> Iterator[Span]:
    """Yield the bubble spans of one step.

    Args:
        schedule: The table that ran.
        rows: The actions of each rank, by rank in the order of the table's ranks.
    """
    played = play(schedule, _mean_times(schedule, rows.values()))
    begin = min(row[0][1] for row in rows.values())
    end = max(row[-1][2] for row in rows.values())
    for place, (rank, row) in enumerate(rows.items()):
        forced = _gaps(
            0.0, list(zip(played.starts[place], played.stops[place], strict=True)), played.makespan
        )
        measured = _gaps(begin, [(start, stop) for _, start, stop in row], end)
        allowed = 0.0  # forced seconds not yet seen: noise moves gaps to their neighbours
        for (start, stop), (first, last) in zip(measured, forced, strict=True):
            allowed += last - first
            length = min(stop - start, allowed)
            if length > 0:
                allowed -= length
                yield Span(rank, Lane.COMPUTE, Kind.BUBBLE, "pipeline", start, length)


def _gaps(begin: float, worked: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Return the intervals before, between and after the intervals of work."""
    edges = [begin, *(edge for piece in worked for edge in piece), end]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _schedule_of(table: Sequence[Sequence[Action]]) -> Schedule | None:
    """Return the table that ran; None if a part of it was not recorded."""
    placement = {action.stage: rank for rank, row in enumerate(table) for action in row}
    stages = len(placement)
    if sorted(placement) != list(range(stages)) or stages % len(table):
        return None
    schedule = Schedule(
        name="measured",
        ranks=len(table),
        virtual=stages // len(table),
        microbatches=1 + max(action.microbatch for row in table for action in row),
        placement=tuple(placement[stage] for stage in range(stages)),
        table=tuple(map(tuple, table)),
    )
    try:
        require_sound(schedule)
    except PlanError:
        return None
    return schedule


def _mean_times(schedule: Schedule, rows: Iterable[Row]) -> Times:
    """Return the means of the measured times, equal for every stage."""
    seconds: dict[Work, list[float]] = {work: [] for work in Work}
    for row in rows:
        for action, start, stop in row:
            seconds[action.work].append(stop - start)
    means = {work: fmean(found) for work, found in seconds.items() if found}
    whole = means.get(Work.BACKWARD, 0.0)
    return Times.equal(
        schedule.stages,
        forward=means[Work.FORWARD],
        input=means.get(Work.INPUT, whole / 2),
        weight=means.get(Work.WEIGHT, whole / 2),
    )


def measured_timeline(run: Run) -> Timeline:
    """Return the Timeline of the steps under the run's present Plan, with bubbles marked.

    A run that continued under another Plan, or on other ranks, names the first step of the present layout in
    `since_step`: averages over several layouts would describe none of them.

    Raises:
        ShoalError: A file of the run is malformed.
    """
    timeline = Timeline.read(run.timeline)
    since: int | None = run.description.get("since_step")
    return mark_bubbles(timeline if since is None else timeline.since_step(since))


def recorded_cluster(run: Run) -> Cluster | None:
    """Return the Cluster that a run was given, or that its Plan was chosen for; None if it had none.

    Raises:
        ClusterError: The description of the Cluster is invalid.
        ShoalError: run.json is malformed.
    """
    described = run.description.get("cluster")
    return None if described is None else Cluster.of(described, f"the cluster of {run.path}")


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
