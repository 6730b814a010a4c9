"""What if: the seconds of a step without a slow rank, a slow stage, a link, a wait or a kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.replay.changes import (
    as_ideal,
    as_others,
    stage_of,
    transfers_as_others,
    without_transfers,
    without_waits,
    without_work,
)
from shoal.replay.critical_path import OnPath, critical_path
from shoal.replay.graph import Graph, Work
from shoal.replay.measured import graphs_of
from shoal.replay.play import Played, play
from shoal.timeline import Kind, Timeline

_KINDS = (Kind.DATA_WAIT, Kind.COPY, Kind.OPTIMIZER, Kind.OTHER)
_MOST_WAITS = 10
_MOST_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class Saving:
    """A change, and what it would save.

    Attributes:
        kind: Kind of the change: "rank", "stage", "link", "network", "wait" or "work".
        what: What would be different, as a phrase.
        seconds: Seconds of a step that it would save.
    """

    kind: str
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What steps would take without this and that.

    Attributes:
        steps: The steps that were replayed.
        seconds: Seconds of a step, as measured.
        replayed: Seconds of a step in the replay without a change: how exact the replay is.
        ideal: Seconds of a step if all work and all transfers took what they take on average.
        savings: The changes, the most worth first.
        path: The critical path, the largest part first; seconds are of a step.
    """

    steps: tuple[int, ...]
    seconds: float
    replayed: float
    ideal: float
    savings: tuple[Saving, ...]
    path: tuple[OnPath, ...]

    @property
    def slowdown(self) -> float:
        """Return the measured seconds over the ideal ones."""
        return self.replayed / self.ideal


def what_if(timeline: Timeline, steps: Sequence[int] | None = None) -> WhatIf:
    """Replay steps of a measured timeline with changes.

    Args:
        timeline: The measured timeline.
        steps: Steps to choose from; see `graphs_of`.

    Raises:
        ShoalError: No step was finished by all ranks.
    """
    graphs = _few_enough(graphs_of(timeline, steps))
    played = [play(graph) for graph in graphs]
    count = sum(len(graph.steps) for graph in graphs)
    replayed = sum(each.seconds for each in played)
    saved: dict[tuple[str, str], float] = {}
    parts: dict[tuple[int | None, tuple[int, ...], str], float] = {}
    names = _waited_most(played)
    for graph, each in zip(graphs, played, strict=True):
        for kind, what, changed in _changes(graph, names):
            saved[kind, what] = saved.get((kind, what), 0.0) + each.seconds - play(changed).seconds
        for part in critical_path(each):
            key = part.rank, part.group, part.what
            parts[key] = parts.get(key, 0.0) + part.seconds
    savings = [Saving(kind, what, seconds / count) for (kind, what), seconds in saved.items()]
    path = [OnPath(*key, seconds / count) for key, seconds in parts.items()]
    return WhatIf(
        steps=tuple(step for graph in graphs for step in graph.steps),
        seconds=sum(_measured_seconds(timeline, graph) for graph in graphs) / count,
        replayed=replayed / count,
        ideal=sum(play(as_ideal(graph)).seconds for graph in graphs) / count,
        savings=tuple(sorted(savings, key=lambda saving: -saving.seconds)),
        path=tuple(sorted(path, key=lambda part: -part.seconds)),
    )


def _few_enough(graphs: Sequence[Graph]) -> list[Graph]:
    """Return the last graphs, as many as can be played many times in a short time; at least one."""
    chosen: list[Graph] = []
    events = 0
    for graph in reversed(graphs):
        events += sum(map(len, graph.programs.values()))
        if chosen and events > _MOST_EVENTS:
            break
        chosen.append(graph)
    return chosen[::-1]


def _measured_seconds(timeline: Timeline, graph: Graph) -> float:
    ends = [timeline.step(rank, graph.steps[-1]) for rank in graph.programs]
    return max(span.stop for span in ends if span is not None) - min(graph.starts.values())


def _changes(graph: Graph, names: Sequence[str]) -> Iterator[tuple[str, str, Graph]]:
    """Yield each change: its kind, what is different, and the graph with it."""
    if len(graph.programs) > 1:
        for rank in graph.programs:
            yield "rank", f"rank {rank} works as its peers do", as_others(graph, [rank])
    stages = _stages(graph)
    if len(stages) > 1:
        for stage, ranks in stages.items():
            yield "stage", f"stage {stage} works as the other stages do", as_others(graph, ranks)
    groups = sorted({each.group for each in graph.collectives if len(each.group) > 1})
    for group in groups if len(groups) > 1 else ():
        named = f"{_named(group)} are as quick as other groups"
        yield "link", f"transfers among {named}", transfers_as_others(graph, [group])
    yield "network", "all transfers take no time", without_transfers(graph)
    for name in names:
        yield "wait", f"nobody waits for {name}", without_waits(graph, [name])
    present = {
        event.kind for program in graph.programs.values() for event in program if isinstance(event, Work)
    }
    for kind in _KINDS:
        if kind in present:
            yield "work", f"no {kind.replace('_', ' ')}", without_work(graph, [kind])


def _stages(graph: Graph) -> dict[int, list[int]]:
    """Return the ranks of each stage, for ranks that have one stage."""
    stages: dict[int, list[int]] = {}
    for rank, program in graph.programs.items():
        found = {stage_of(event) for event in program if isinstance(event, Work)} - {None}
        if len(found) == 1:
            (stage,) = found
            if stage is not None:
                stages.setdefault(stage, []).append(rank)
    return dict(sorted(stages.items()))


def _waited_most(played: Sequence[Played]) -> list[str]:
    """Return the names of the collectives that ranks waited for longest."""
    waited: dict[str, float] = {}
    for each in played:
        for rank, program in each.graph.programs.items():
            before = each.graph.starts[rank]
            for event, stop in zip(program, each.stops[rank], strict=True):
                if not isinstance(event, Work) and stop > before:
                    name = each.graph.collectives[event.collective].name
                    waited[name] = waited.get(name, 0.0) + stop - before
                before = stop
    return sorted(waited, key=lambda name: -waited[name])[:_MOST_WAITS]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"
