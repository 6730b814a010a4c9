"""Changes of a graph: what ranks did, but without something that slowed them.

Work is changed as a whole: all work of a kind that a rank does in a step is made longer or shorter by one
factor, so that its sum is the mean over the ranks it is compared with. A transfer is compared with alike
ones: the same operation, bytes and number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from shoal.errors import PlanError
from shoal.plan.schedules import Action
from shoal.replay.graph import Await, Collective, Event, Graph, Work
from shoal.timeline import Kind

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
