"""What ranks did, as a graph: work in order on each rank, and collectives that join ranks.

A rank's program is a list of events: `Work` takes its seconds; `Arrive` starts a collective on this rank,
which goes on meanwhile; `Await` stops the rank until the collective has ended. A collective begins when the
last of its ranks has arrived and the collective before it has ended.

The critical path: the chain of work and transfers, across ranks, that gives the end of the steps.

It is followed back from the last end. Where a rank waited for a collective, the path goes through the
transfer to the rank that arrived last, or to the collective before it in the group.

Changes of a graph: what ranks did, but without something that slowed them.

Work is changed as a whole: all work of a kind that a rank does in a step is made longer or shorter by one
factor, so that its sum is the mean over the ranks it is compared with. A transfer is compared with alike
ones: the same operation, bytes and number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from shoal.errors import PlanError, ShoalError
from shoal.spec.plan.schedules import Action
from shoal.spec.timeline import Kind


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a rank.

    Attributes:
        kind: Its kind, one of `shoal.spec.timeline.Kind`.
        name: The name of its span.
        step: The index of the step that it belongs to.
        seconds: How long it takes.
    """

    kind: str
    name: str
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Arrive:
    """The rank starts a collective: `collective` is its number."""

    collective: int


@dataclass(frozen=True, slots=True)
class Await:
    """The rank waits until a collective has ended: `collective` is its number."""

    collective: int


Event = Work | Arrive | Await


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective.

    Attributes:
        name: The name of its spans.
        purpose: One of `shoal.spec.timeline.Purpose`, or "".
        step: The index of the step in which it starts.
        bytes: The bytes of its tensor.
        group: The ranks that take part.
        seconds: For each rank, the seconds from when all have arrived until it ends there.
        after: The number of the collective that it has to wait for, if any: ranks of a group do them one
            after another.
    """

    name: str
    purpose: str
    step: int
    bytes: int
    group: tuple[int, ...]
    seconds: Mapping[int, float]
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """The programs of all ranks.

    Attributes:
        programs: The events of each rank, in order.
        starts: When each rank begins its program, in seconds.
        collectives: The collectives, by number.
        steps: The indices of the steps in the programs, ascending.
    """

    programs: Mapping[int, Sequence[Event]]
    starts: Mapping[int, float]
    collectives: Sequence[Collective]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """The times of a graph.

    Attributes:
        graph: The graph.
        stops: For each rank, the end of each event.
        arrivals: For each collective, the arrival of each rank.
        begins: For each collective, when it begins.
        ends: For each collective, its end on each rank.
    """

    graph: Graph
    stops: Mapping[int, Sequence[float]]
    arrivals: Sequence[Mapping[int, float]]
    begins: Sequence[float]
    ends: Sequence[Mapping[int, float]]

    @property
    def seconds(self) -> float:
        """Return the seconds from the first start to the last end."""
        last = max(stops[-1] if stops else self.graph.starts[rank] for rank, stops in self.stops.items())
        return last - min(self.graph.starts.values())


@dataclass(slots=True)
class _State:
    arrivals: list[dict[int, float]]
    begins: list[float]
    ends: list[dict[int, float]]
    waiting: dict[int, list[int]] = field(default_factory=dict)
    """By collective, the ranks that wait for it."""
    followers: dict[int, list[int]] = field(default_factory=dict)
    """By collective, those that may begin only after it."""


def play(graph: Graph) -> Played:
    """Return the times of all events.

    Raises:
        ShoalError: Ranks wait for one another in a circle, so the graph never ends.
    """
    count = len(graph.collectives)
    state = _State([{} for _ in range(count)], [0.0] * count, [{} for _ in range(count)])
    for number, collective in enumerate(graph.collectives):
        if collective.after is not None:
            state.followers.setdefault(collective.after, []).append(number)
    stops: dict[int, list[float]] = {rank: [] for rank in graph.programs}
    able = list(graph.programs)
    while able:
        _go_on(able.pop(), graph, state, stops, able)
    for rank, program in graph.programs.items():
        if len(stops[rank]) < len(program):
            raise ShoalError(f"rank {rank} waits for a collective that never ends, so no replay is possible")
    return Played(graph, stops, state.arrivals, state.begins, state.ends)


def _go_on(rank: int, graph: Graph, state: _State, stops: dict[int, list[float]], able: list[int]) -> None:
    """Let a rank go on until it waits for a collective that has not ended, or until its program ends."""
    program, done = graph.programs[rank], stops[rank]
    now = done[-1] if done else graph.starts[rank]
    for index in range(len(done), len(program)):
        event = program[index]
        if isinstance(event, Work):
            now += event.seconds
        elif isinstance(event, Arrive):
            arrivals = state.arrivals[event.collective]
            arrivals[rank] = now
            if len(arrivals) == len(graph.collectives[event.collective].seconds):
                _end_if_able(event.collective, graph, state, able)
        elif isinstance(event, Await):
            end = state.ends[event.collective].get(rank)
            if end is None:
                state.waiting.setdefault(event.collective, []).append(rank)
                return
            now = max(now, end)
        done.append(now)


def _end_if_able(number: int, graph: Graph, state: _State, able: list[int]) -> None:
    """End a collective, and those after it, if all have arrived and the one before has ended."""
    pending = [number]
    while pending:
        number = pending.pop()
        collective = graph.collectives[number]
        if state.ends[number] or len(state.arrivals[number]) < len(collective.seconds):
            continue
        begin = max(state.arrivals[number].values())
        if collective.after is not None:
            before = state.ends[collective.after]
            if not before:
                continue
            begin = max(begin, *before.values())
        state.begins[number] = begin
        state.ends[number] = {rank: begin + seconds for rank, seconds in collective.seconds.items()}
        able.extend(state.waiting.pop(number, ()))
        pending.extend(state.followers.get(number, ()))


@dataclass(frozen=True, slots=True)
class OnPath:
    """A part of the critical path.

    Attributes:
        rank: The rank that works; None for a transfer.
        group: The ranks of a transfer; empty for work.
        what: The kind of the work, or the operation of the transfer.
        seconds: Seconds of the path, in all steps.
    """

    rank: int | None
    group: tuple[int, ...]
    what: str
    seconds: float


def critical_path(played: Played) -> list[OnPath]:
    """Return the parts of the critical path, summed up by rank and kind or by group and operation.

    The largest come first. Their sum is the time from the start of the rank on which the path begins.
    """
    graph = played.graph
    arrivals = {
        (rank, event.collective): position
        for rank, program in graph.programs.items()
        for position, event in enumerate(program)
        if isinstance(event, Arrive)
    }
    sums: dict[tuple[int | None, tuple[int, ...], str], float] = {}

    def add(rank: int | None, group: tuple[int, ...], what: str, seconds: float) -> None:
        sums[rank, group, what] = sums.get((rank, group, what), 0.0) + seconds

    rank = max(played.stops, key=lambda each: played.stops[each][-1] if played.stops[each] else 0.0)
    position = len(graph.programs[rank]) - 1
    while position >= 0:
        event = graph.programs[rank][position]
        before = played.stops[rank][position - 1] if position else graph.starts[rank]
        if isinstance(event, Work):
            add(rank, (), event.kind, event.seconds)
        elif isinstance(event, Await) and played.ends[event.collective][rank] > before:
            number, end = event.collective, played.ends[event.collective][rank]
            while True:
                each, begin = graph.collectives[number], played.begins[number]
                add(None, each.group, each.name.partition(":")[0], end - begin)
                last = max(played.arrivals[number], key=lambda other: played.arrivals[number][other])
                if each.after is None or played.arrivals[number][last] >= begin:
                    break
                number, end = each.after, begin
            rank, position = last, arrivals[last, number]
        position -= 1
    found = [OnPath(*key, seconds) for key, seconds in sums.items() if seconds > 0]
    return sorted(found, key=lambda part: -part.seconds)


_Sums = dict[tuple[int, int, str], float]
"""Seconds of work by rank, step and kind."""


def as_others(graph: Graph, ranks: Collection[int]) -> Graph:
    """Return the graph in which these ranks work as long as the mean of the other ranks that do the same.

    Ranks do the same if their work has the same kinds and names. Without such ranks, all others count.
    """
    content = {rank: _content(program) for rank, program in graph.programs.items()}
    sums = _sums(graph)
    factors: dict[tuple[int, int, str], float] = {}
    for rank in ranks:
        others = [other for other in graph.programs if other not in ranks]
        compared = [other for other in others if content[other] == content[rank]] or others
        if compared:
            factors |= _factors(sums, [rank], compared)
    return _scaled(graph, factors)


def as_ideal(graph: Graph) -> Graph:
    """Return the graph in which all work and all transfers take what they take on average.

    Work of a kind takes the mean over all ranks, a transfer the median of alike ones, as in Lin et al.,
    "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv:2505.05713).
    """
    ranks = list(graph.programs)
    return transfers_as_others(_scaled(graph, _factors(_sums(graph), ranks, ranks)), None)


def without_work(graph: Graph, kinds: Collection[str]) -> Graph:
    """Return the graph in which work of these kinds takes no time."""
    return _with_work(graph, lambda rank, work: 0.0 if work.kind in kinds else work.seconds)


def without_transfers(graph: Graph, groups: Collection[tuple[int, ...]] | None = None) -> Graph:
    """Return the graph in which transfers take no time once all have arrived: those of groups, or all."""
    return _with_transfers(
        graph,
        lambda each: (
            dict.fromkeys(each.seconds, 0.0) if groups is None or each.group in groups else each.seconds
        ),
    )


def transfers_as_others(graph: Graph, groups: Collection[tuple[int, ...]] | None) -> Graph:
    """Return the graph in which transfers take the median of alike ones.

    Args:
        graph: The graph.
        groups: The groups whose transfers are changed; they are compared with those of other groups. None to
            compare and change all.
    """
    alike: dict[tuple[str, int, int], list[float]] = {}
    for each in graph.collectives:
        if groups is None or each.group not in groups:
            alike.setdefault(_class(each), []).append(fmean(each.seconds.values()))
    medians = {kind: median(seconds) for kind, seconds in alike.items()}

    def changed(each: Collective) -> Mapping[int, float]:
        if (groups is not None and each.group not in groups) or _class(each) not in medians:
            return each.seconds
        return dict.fromkeys(each.seconds, medians[_class(each)])

    return _with_transfers(graph, changed)


def without_waits(graph: Graph, names: Collection[str]) -> Graph:
    """Return the graph in which no rank waits for collectives of these names, as if they were hidden."""

    def kept(event: Event) -> bool:
        return not (isinstance(event, Await) and graph.collectives[event.collective].name in names)

    programs = {rank: [event for event in program if kept(event)] for rank, program in graph.programs.items()}
    return replace(graph, programs=programs)


def stage_of(work: Work) -> int | None:
    """Return the pipeline stage that a work's name tells; None if it tells none."""
    if work.kind in (Kind.FORWARD, Kind.BACKWARD):
        with contextlib.suppress(PlanError):
            return Action.parse(work.name).stage
    return None


def _content(program: Iterable[Event]) -> frozenset[tuple[str, str]]:
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return frozenset(
        (event.kind, event.name) for event in program if isinstance(event, Work) and event.kind in kinds
    )


def _sums(graph: Graph) -> _Sums:
    sums: _Sums = {}
    for rank, program in graph.programs.items():
        for event in program:
            if isinstance(event, Work):
                key = rank, event.step, event.kind
                sums[key] = sums.get(key, 0.0) + event.seconds
    return sums


def _factors(
    sums: _Sums, ranks: Collection[int], compared: Sequence[int]
) -> dict[tuple[int, int, str], float]:
    """Return by how much the work of ranks is to be multiplied, to be the mean of others."""
    return {
        key: fmean(sums.get((other, *key[1:]), 0.0) for other in compared) / seconds
        for key, seconds in sums.items()
        if key[0] in ranks and seconds > 0
    }


def _scaled(graph: Graph, factors: Mapping[tuple[int, int, str], float]) -> Graph:
    changed = {rank for rank, _, _ in factors}
    return _with_work(
        graph, lambda rank, work: work.seconds * factors.get((rank, work.step, work.kind), 1.0), changed
    )


def _with_work(
    graph: Graph, seconds: Callable[[int, Work], float], ranks: Collection[int] | None = None
) -> Graph:
    """Return the graph with other seconds of work; only that of `ranks` changes, if they are given."""

    def changed(rank: int, event: Event) -> Event:
        if not isinstance(event, Work):
            return event
        return Work(event.kind, event.name, event.step, seconds(rank, event))

    programs = dict(graph.programs)
    for rank in graph.programs if ranks is None else ranks:
        programs[rank] = [changed(rank, event) for event in graph.programs[rank]]
    return replace(graph, programs=programs)


def _with_transfers(graph: Graph, seconds: Callable[[Collective], Mapping[int, float]]) -> Graph:
    def changed(each: Collective) -> Collective:
        now = seconds(each)
        return each if now is each.seconds else replace(each, seconds=now)

    return replace(graph, collectives=list(map(changed, graph.collectives)))


def _class(each: Collective) -> tuple[str, int, int]:
    return each.name.partition(":")[0], each.bytes, len(each.group)
