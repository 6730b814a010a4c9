"""A pipeline's measured steps beside what its table gives with the measured times of its stages.

Of each recorded step: how long each stage's F and B, or I and W, took on the mean over micro-batches; how
long a message between two stages took on the median, from when both ends had begun it; the table played with
these times; and the measured time from the first action's start to the last one's end. So what a stage's work
costs is taken as found, with what others on the machine did to it, and what is compared is the rest: order,
waiting, and what the runtime does between actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median

from rounds import Spread

from shoal.errors import PlanError
from shoal.spec.plan.schedules import Action, Played, Schedule, Times, Work, play
from shoal.spec.plan.schedules.play import Precedence
from shoal.spec.timeline import Kind, Span, Timeline

__all__ = ["PlayedStep", "median_times", "played_steps", "spread_of"]

_MESSAGES = ("activation", "gradient")
_Row = list[tuple[Action, Span]]
"""What a rank did in a step, in order."""


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step as it was, and as its table has it.

    Attributes:
        played: The table with the measured times.
        seconds: From the first action's start to the last one's end, over all ranks.
        busy: Seconds in actions, over all ranks.
        idle: Seconds that ranks wait: for messages, for their first action, and from their last one on. The
            rest is what the runtime does between actions.
        whole: Seconds of the whole step, with the optimizer's part; the mean over ranks.
        unequal: Seconds that the table takes if each action takes as long as it did, not as its like on the
            mean: some of the waiting is for actions that took longer than others of their stage.
    """

    played: Played
    seconds: float
    busy: float
    idle: float
    whole: float
    unequal: float

    @property
    def ratio(self) -> float:
        """The measured time over the table's."""
        return self.seconds / self.played.makespan

    @property
    def bubble(self) -> float:
        """Measured idle time as a share of all ranks' time."""
        return self.idle / (self.seconds * self.played.schedule.ranks)

    @property
    def between(self) -> float:
        """Time between actions that is not idle, as a share of all ranks' time."""
        return 1 - (self.idle + self.busy) / (self.seconds * self.played.schedule.ranks)

    @property
    def unequal_bubble(self) -> float:
        """Idle time of the table as a share, if each action takes as long as it did."""
        return 1 - self.busy / (self.unequal * self.played.schedule.ranks)


def played_steps(timeline: Timeline, schedule: Schedule, skip: int = 0) -> list[PlayedStep]:
    """The recorded steps of one pipeline, whose rank i is the i-th of the timeline.

    Args:
        timeline: With the spans of actions.
        schedule: The table that was run.
        skip: How many steps at the beginning do not count.
    """
    spans = {rank: list(_actions(timeline.of(rank))) for rank in timeline.ranks}
    messages = {rank: list(_messages(timeline.of(rank))) for rank in timeline.ranks}
    steps = []
    for index in timeline.steps()[skip:]:
        windows = {rank: timeline.step(rank, index) for rank in timeline.ranks}
        bounds = {rank: window for rank, window in windows.items() if window is not None}
        if len(bounds) < len(windows):
            continue
        rows = [
            [pair for pair in spans[rank] if _is_within(pair[1], window)] for rank, window in bounds.items()
        ]
        found = [
            {action: span for action, span in messages[rank] if _is_within(span, window)}
            for rank, window in bounds.items()
        ]
        times = _times(schedule, rows, found)
        began, ended = min(row[0][1].start for row in rows), max(row[-1][1].stop for row in rows)
        steps.append(
            PlayedStep(
                play(schedule, times),
                ended - began,
                sum(span.duration for row in rows for _, span in row),
                sum(
                    row[0][1].start - began + ended - row[-1][1].stop + _waited(timeline.of(rank), row)
                    for rank, row in zip(bounds, rows, strict=True)
                ),
                fmean(window.duration for window in bounds.values()),
                _with_own_times(schedule, times, rows),
            )
        )
    return steps


def median_times(steps: Sequence[PlayedStep]) -> Times:
    """The medians over steps of the times that their tables were played with."""

    def over(field: str) -> tuple[float, ...]:
        return tuple(map(median, zip(*(getattr(step.played.times, field) for step in steps), strict=True)))

    return Times(over("forward"), over("input"), over("weight"), over("transfer"))


def spread_of(steps: Sequence[PlayedStep], figure: str) -> Spread:
    """Median and range over steps of one of their figures."""
    return Spread.of([getattr(step, figure) for step in steps])


def _waited(spans: Sequence[Span], row: _Row) -> float:
    """Seconds that a rank waits for messages between its first and its last action."""
    first, last = row[0][1].start, row[-1][1].start
    return sum(span.duration for span in spans if span.kind == Kind.WAIT and first < span.start < last)


def _with_own_times(schedule: Schedule, times: Times, rows: Sequence[_Row]) -> float:
    """Seconds of the table with the time of each action, and the messages' on the median."""
    precedence = Precedence.of(schedule.placement, schedule.microbatches, times.transfer)
    durations = precedence.durations(times.forward, times.input, times.weight)
    numbers = [[precedence.number(action) for action, _ in row] for row in rows]
    for row, found in zip(rows, numbers, strict=True):
        for (_, span), number in zip(row, found, strict=True):
            durations[number] = span.duration
    _, stops, _ = precedence.play(numbers, durations)
    return max(stops)


def _actions(spans: Sequence[Span]) -> Iterator[tuple[Action, Span]]:
    for span in spans:
        if span.kind in (Kind.FORWARD, Kind.BACKWARD):
            with suppress(PlanError):
                yield Action.parse(span.name), span


def _messages(spans: Sequence[Span]) -> Iterator[tuple[Action, Span]]:
    """Each with the action that waits for it, which is the same on both ranks."""
    for span in spans:
        what, _, action = span.name.partition(":")
        if span.kind == Kind.COLLECTIVE and what in _MESSAGES:
            with suppress(PlanError):
                yield Action.parse(action), span


def _is_within(span: Span, window: Span) -> bool:
    return window.start <= span.start < window.stop


def _times(schedule: Schedule, rows: Sequence[_Row], messages: Sequence[Mapping[Action, Span]]) -> Times:
    seconds: dict[tuple[int, Work], list[float]] = defaultdict(list)
    for row in rows:
        for action, span in row:
            seconds[action.stage, action.work].append(span.duration)
    halves = [_halves(seconds, stage) for stage in range(schedule.stages)]
    return Times(
        forward=tuple(fmean(seconds[stage, Work.FORWARD]) for stage in range(schedule.stages)),
        input=tuple(first for first, _ in halves),
        weight=tuple(second for _, second in halves),
        transfer=_transfers(schedule, messages),
    )


def _halves(seconds: Mapping[tuple[int, Work], Sequence[float]], stage: int) -> tuple[float, float]:
    """I and W of a stage, such that its backwards, whole and in halves, take together what they took."""
    whole, first, second = (
        seconds.get((stage, work), ()) for work in (Work.BACKWARD, Work.INPUT, Work.WEIGHT)
    )
    if not first:
        return fmean(whole) / 2, fmean(whole) / 2
    input, weight = fmean(first), fmean(second)
    alike = (len(whole) + len(first)) * (input + weight)
    scale = (sum(whole) + sum(first) + sum(second)) / alike
    return input * scale, weight * scale


def _transfers(schedule: Schedule, messages: Sequence[Mapping[Action, Span]]) -> tuple[float, ...]:
    """By boundary, the median time of a message; 0 where both stages are on one rank."""
    seconds: list[list[float]] = [[] for _ in range(schedule.stages - 1)]
    for rank, here in enumerate(messages):
        for action, received in here.items():
            if schedule.placement[action.stage] != rank:
                continue
            made_by = action.stage + (-1 if action.work is Work.FORWARD else 1)
            sent = messages[schedule.placement[made_by]].get(action)
            if sent is not None:
                boundary = min(action.stage, made_by)
                seconds[boundary].append(max(received.stop - max(sent.start, received.start), 0.0))
    return tuple(median(found) if found else 0.0 for found in seconds)
