"""Play a graph: the time of each event, as early as work, arrivals and collectives allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import ShoalError
from shoal.replay.graph import Arrive, Await, Graph, Work


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
