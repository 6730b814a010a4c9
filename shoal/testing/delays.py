"""Timelines of training with a delay in one phase of one rank, for tests of verdicts.

`Layout` says how ranks are joined, `Delay` what is wrong, `Jitter` how much the phases of real runs vary.
`delayed_timeline` plays the programs of all ranks (`shoal.analyze.replay`), so that a delay travels as in a
real run: ranks wait for it at their collectives, buckets overlap with backward, and pipelines pass it on.
"""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Self

from shoal.analyze.diagnosis import Cause
from shoal.analyze.diagnosis.compute_time import PHASES, own_work
from shoal.analyze.replay import Arrive, Await, Collective, Event, Graph, Work, play
from shoal.spec.plan.schedules import Work as Action
from shoal.spec.plan.schedules import make
from shoal.spec.timeline import Kind, Lane, Purpose, Span, Timeline
from shoal.spec.timeline.intervals import StepWindows

_SECONDS = {
    Cause.LOADER: 0.002,
    Cause.COPY: 0.001,
    Cause.FORWARD: 0.030,
    Cause.BACKWARD: 0.060,
    Cause.OPTIMIZER: 0.005,
    Cause.OUTSIDE: 0.001,
}
"""Seconds of the phases of a step without delay."""

_KINDS = {
    Cause.LOADER: (Kind.DATA_WAIT, ""),
    Cause.COPY: (Kind.DATA_WAIT, "inputs"),
    Cause.FORWARD: (Kind.FORWARD, ""),
    Cause.BACKWARD: (Kind.BACKWARD, ""),
    Cause.OPTIMIZER: (Kind.OPTIMIZER, ""),
    Cause.OUTSIDE: (Kind.OTHER, ""),
}
_AROUND = 20  # steps before and after, for the typical step
_BUCKETS = 4
_BLOCKS = 4
_MICROBATCHES = 4
_WAKE = 5e-6  # seconds from the end of a collective to the end of the wait


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks are joined; `tp` varies fastest, then `dp`, then `pp`."""

    dp: int
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.tp * self.pp

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """Return the rank at a place."""
        return (pp * self.dp + dp) * self.tp + tp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the place of a rank along pp, dp and tp."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp


@dataclass(frozen=True, slots=True)
class Delay:
    """What is wrong with a rank.

    Attributes:
        rank: The rank.
        cause: Its phase; LINK for its communication, MACHINE for all of its compute.
        share: The delay as a share of the undisturbed step.
        is_late: Whether a step has the delay, by its index.
    """

    rank: int
    cause: Cause
    share: float
    is_late: Callable[[int], bool] = field(default=lambda step: True)


@dataclass(frozen=True, slots=True)
class Jitter:
    """How phases vary: for each recorded rank, the ratio of each phase to its median, step by step."""

    series: Sequence[Sequence[Mapping[Cause, float]]]

    @classmethod
    def of(cls, timeline: Timeline, *, warm_up: int = 5) -> Self:
        """Return the jitter of a recorded run.

        Ratios are to the median of the steps around, so that slow drift of the machine, which all ranks of a
        run share, is left out. Copies vary as forward does, since CPUs make none.
        """
        series = []
        for rank in timeline.ranks:
            steps = own_work(timeline, StepWindows(timeline, rank), rank).steps
            seconds = [steps[index].seconds for index in sorted(steps)[warm_up:]]
            ratios = []
            for position, each in enumerate(seconds):
                around = seconds[max(position - _AROUND, 0) : position + _AROUND + 1]
                typical = {cause: median(other[cause] for other in around) for cause in PHASES}
                ratios.append({cause: each[cause] / typical[cause] for cause in PHASES if typical[cause] > 0})
            series.append([{**each, Cause.COPY: each[Cause.FORWARD]} for each in ratios])
        return cls(series)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read the ratios of one or more ranks from a CSV file, as `write` made it."""
        series: dict[str, list[Mapping[Cause, float]]] = {}
        with Path(path).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rank = row.pop("rank")
                series.setdefault(rank, []).append({Cause(name): float(value) for name, value in row.items()})
        return cls(list(series.values()))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the ratios as a CSV file: a row a step, a column a phase."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["rank", *PHASES])
            for rank, steps in enumerate(self.series):
                for step in steps:
                    writer.writerow([rank, *(f"{step.get(cause, 1.0):.4g}" for cause in PHASES)])

    def draw(self, randomness: random.Random, steps: int) -> list[Mapping[Cause, float]]:
        """Return the ratios of consecutive steps of a recorded rank, from a random one on, in a circle."""
        series = randomness.choice(self.series)
        first = randomness.randrange(len(series))
        return [series[(first + step) % len(series)] for step in range(steps)]


def delayed_timeline(
    layout: Layout, steps: int, jitter: Jitter, seed: int, delay: Delay | None = None
) -> Timeline:
    """Return the timeline of a training with a delay.

    Args:
        layout: How ranks are joined.
        steps: The number of steps.
        jitter: How phases vary.
        seed: Seed of all randomness.
        delay: What is wrong; nothing if None.
    """
    randomness = random.Random(seed)
    drawn = [jitter.draw(randomness, steps) for _ in range(layout.ranks)]
    training = _Training(layout, drawn, randomness, delay)
    for step in range(1, steps + 1):
        training.step(step)
    return training.timeline()


@dataclass(slots=True)
class _Bracket:
    """A span that covers the events [first, last) of a rank."""

    kind: str
    name: str
    first: int
    last: int = 0


class _Training:
    """Programs of all ranks, and the spans that cover their events."""

    def __init__(
        self,
        layout: Layout,
        drawn: Sequence[Sequence[Mapping[Cause, float]]],
        randomness: random.Random,
        delay: Delay | None,
    ) -> None:
        self._layout = layout
        self._drawn = drawn
        self._randomness = randomness
        self._delay = delay
        self._programs: list[list[Event]] = [[] for _ in range(layout.ranks)]
        self._brackets: list[list[_Bracket]] = [[] for _ in range(layout.ranks)]
        self._collectives: list[Collective] = []
        self._last_of: dict[tuple[int, ...], int] = {}
        self._step = 0
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}

    def step(self, index: int) -> None:
        """Append a step to all programs."""
        self._step = index
        self._numbers.clear()
        ranks = range(self._layout.ranks)
        opened = [self._open(rank, Kind.STEP, str(index)) for rank in ranks]
        for rank in ranks:
            self._phase(rank, Cause.OUTSIDE)
            self._phase(rank, Cause.LOADER)
            self._phase(rank, Cause.COPY)
        (self._pipeline if self._layout.pp > 1 else self._one_by_one)()
        for rank in ranks:
            optimizer = self._open(rank, Kind.OPTIMIZER, "")
            self._wait(rank, "all_reduce:gradient norm", tuple(ranks), 8, 0.0002, Purpose.CONTROL)
            self._work(rank, Cause.OPTIMIZER, 1.0)
            self._close(rank, optimizer)
            self._close(rank, opened[rank])

    def timeline(self) -> Timeline:
        """Play the programs and return the spans."""
        ranks = range(self._layout.ranks)
        graph = Graph(
            programs=dict(enumerate(self._programs)),
            starts=dict.fromkeys(ranks, 0.0),
            collectives=self._collectives,
            steps=(),
        )
        played = play(graph)
        spans: list[Span] = []
        for number, collective in enumerate(self._collectives):
            for rank, arrival in played.arrivals[number].items():
                spans.append(
                    Span(
                        rank,
                        Lane.COMMUNICATION,
                        Kind.COLLECTIVE,
                        collective.name,
                        arrival,
                        played.ends[number][rank] - arrival,
                        collective.bytes,
                        collective.group,
                        purpose=collective.purpose,
                    )
                )
        for rank in ranks:
            times = [0.0, *played.stops[rank]]
            for bracket in self._brackets[rank]:
                start, stop = times[bracket.first], times[bracket.last]
                spans.append(Span(rank, Lane.COMPUTE, bracket.kind, bracket.name, start, stop - start))
            for position, event in enumerate(self._programs[rank]):
                if isinstance(event, Await):
                    each = self._collectives[event.collective]
                    start, stop = times[position], times[position + 2]  # with the wake-up after it
                    seconds, purpose = stop - start, each.purpose
                    spans.append(
                        Span(rank, Lane.COMPUTE, Kind.WAIT, each.name, start, seconds, purpose=purpose)
                    )
        return Timeline(spans)

    def _one_by_one(self) -> None:
        """Append forward and backward without a pipeline."""
        for rank in range(self._layout.ranks):
            tensor, data = self._tensor_group(rank), self._data_group(rank)
            everyone = tuple(range(self._layout.ranks))
            forward = self._open(rank, Kind.FORWARD, "")
            for block in range(_BLOCKS):
                self._work(rank, Cause.FORWARD, 1 / _BLOCKS)
                if len(tensor) > 1:
                    self._wait(rank, f"all_reduce:forward {block}", tensor, 1 << 20, 0.0005, Purpose.TENSOR)
            self._close(rank, forward)
            report = self._arrive(rank, "all_reduce:report", everyone, 8, 0.0002, Purpose.CONTROL)
            backward = self._open(rank, Kind.BACKWARD, "")
            buckets = []
            for block in range(_BUCKETS):
                self._work(rank, Cause.BACKWARD, 1 / _BUCKETS)
                if len(tensor) > 1:
                    self._wait(rank, f"all_reduce:backward {block}", tensor, 1 << 20, 0.0005, Purpose.TENSOR)
                if len(data) > 1:
                    name = f"all_reduce:bucket {block}"
                    buckets.append(self._arrive(rank, name, data, 4 << 20, 0.006, Purpose.DATA))
            for bucket in buckets:
                self._await(rank, bucket)
            self._close(rank, backward)
            self._await(rank, report)

    def _pipeline(self) -> None:
        """Append the forwards and backwards of a pipeline, and the all-reduce of gradients."""
        layout = self._layout
        table = make("1f1b", layout.pp, 1, _MICROBATCHES).table
        for rank in range(layout.ranks):
            stage, dp, tp = layout.place(rank)
            tensor, data = self._tensor_group(rank), self._data_group(rank)
            before = layout.rank(stage - 1, dp, tp) if stage > 0 else None
            after = layout.rank(stage + 1, dp, tp) if stage + 1 < layout.pp else None
            for action in table[stage]:
                is_forward = action.work == Action.FORWARD
                cause = Cause.FORWARD if is_forward else Cause.BACKWARD
                source, target = (before, after) if is_forward else (after, before)
                what = "activation" if is_forward else "gradient"
                if source is not None:
                    pair = (min(source, rank), max(source, rank))
                    name = f"{what}:{pair} {action.microbatch}"
                    self._wait(rank, name, pair, 2 << 20, 0.0008, Purpose.PIPELINE)
                span = self._open(rank, cause, str(action))
                self._work(rank, cause, 1 / _MICROBATCHES)
                if len(tensor) > 1:
                    self._wait(rank, f"all_reduce:{action}", tensor, 1 << 20, 0.0005, Purpose.TENSOR)
                self._close(rank, span)
                if target is not None:
                    pair = (min(target, rank), max(target, rank))
                    self._arrive(
                        rank, f"{what}:{pair} {action.microbatch}", pair, 2 << 20, 0.0008, Purpose.PIPELINE
                    )
            if len(data) > 1:
                self._wait(rank, "all_reduce:gradients", data, 8 << 20, 0.008, Purpose.DATA)

    def _tensor_group(self, rank: int) -> tuple[int, ...]:
        pp, dp, _ = self._layout.place(rank)
        return tuple(self._layout.rank(pp, dp, each) for each in range(self._layout.tp))

    def _data_group(self, rank: int) -> tuple[int, ...]:
        pp, _, tp = self._layout.place(rank)
        return tuple(self._layout.rank(pp, each, tp) for each in range(self._layout.dp))

    def _phase(self, rank: int, cause: Cause) -> None:
        if cause == Cause.OUTSIDE:
            self._work(rank, cause, 1.0)
            return
        kind, name = _KINDS[cause]
        span = self._open(rank, kind, name)
        self._work(rank, cause, 1.0)
        self._close(rank, span)

    def _open(self, rank: int, kind: str, name: str) -> _Bracket:
        bracket = _Bracket(str(kind), name, len(self._programs[rank]))
        self._brackets[rank].append(bracket)
        return bracket

    def _close(self, rank: int, bracket: _Bracket) -> None:
        bracket.last = len(self._programs[rank])

    def _work(self, rank: int, cause: Cause, part: float) -> None:
        """Append a part of a phase, with its jitter and its delay."""
        ratio = self._drawn[rank][self._step - 1].get(cause, 1.0)
        seconds = _SECONDS[cause] * ratio * part
        delay = self._delay
        if delay is not None and delay.rank == rank and delay.is_late(self._step):
            whole = delay.share * sum(_SECONDS.values())
            if delay.cause == cause:
                seconds += whole * part
            elif delay.cause == Cause.MACHINE and cause in (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER):
                seconds += whole * part * _SECONDS[cause] / 0.095
        kind, name = _KINDS[cause]
        self._programs[rank].append(Work(str(kind), name, self._step, seconds))

    def _arrive(
        self, rank: int, name: str, group: tuple[int, ...], nbytes: int, seconds: float, purpose: str
    ) -> int:
        """Append the arrival at a collective, and make it if this rank is the first."""
        number = self._numbers.get((name, group))
        if number is None:
            number = self._numbers[name, group] = len(self._collectives)
            took = self._transfer(group, seconds)
            after = None if purpose == Purpose.PIPELINE else self._last_of.get(group)
            self._last_of[group] = number
            self._collectives.append(
                Collective(
                    name,
                    str(purpose),
                    self._step,
                    nbytes,
                    group,
                    {each: took * self._randomness.uniform(1, 1.01) for each in group},
                    after,
                )
            )
        self._programs[rank].append(Arrive(number))
        return number

    def _transfer(self, group: tuple[int, ...], seconds: float) -> float:
        """Return the seconds of a transfer, with its jitter and its delay."""
        took = seconds * self._randomness.lognormvariate(0.0, 0.05)
        delay = self._delay
        is_slow = delay is not None and delay.cause == Cause.LINK and delay.rank in group
        if delay is not None and is_slow and delay.is_late(self._step):
            took += delay.share * sum(_SECONDS.values()) * seconds / self._exposed_of(delay.rank)
        return took

    def _exposed_of(self, rank: int) -> float:
        """Return the seconds of a step in which a rank's transfers are exposed, about."""
        layout = self._layout
        exposed = 0.0004
        if layout.tp > 1:
            exposed += 0.0005 * (2 * _MICROBATCHES if layout.pp > 1 else _BLOCKS + _BUCKETS)
        if layout.dp > 1:
            exposed += 0.008 if layout.pp > 1 else 0.006
        return exposed + (0.0016 if layout.pp > 1 else 0.0)

    def _await(self, rank: int, number: int) -> None:
        self._programs[rank] += [Await(number), Work(str(Kind.WAIT), "", self._step, _WAKE)]

    def _wait(
        self, rank: int, name: str, group: tuple[int, ...], nbytes: int, seconds: float, purpose: str
    ) -> None:
        """Append a collective that the rank waits for at once."""
        if len(group) > 1:
            self._await(rank, self._arrive(rank, name, group, nbytes, seconds, purpose))
