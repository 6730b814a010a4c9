"""Why the best Plan is the best: what bounds it, what each degree buys, what loses, what to change.

Every figure is a search of its own: with one degree held at half or twice its value, among other kinds of
layout, on a machine of which one thing is twice as much. None is a rule of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.cluster import Cluster
from shoal.planner.candidate import Candidate
from shoal.planner.search import Search
from shoal.planner.space import Degrees
from shoal.units import format_bytes, format_seconds

__all__ = ["Change", "Explanation", "Neighbour", "explain"]

_PART_NAMES = {
    "compute": "compute",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "the exchange with experts",
    "bubble": "the pipeline's bubble",
    "pipeline": "sends between stages",
    "data": "the exchange of gradients and parameters",
    "optimizer": "the optimizer",
}


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The best Plan with one degree at another value.

    Attributes:
        degree: Its name.
        value: The other value.
        best: The best such Plan; None if none fits the memory.
    """

    degree: str
    value: int
    best: Candidate | None


@dataclass(frozen=True, slots=True)
class Change:
    """The best Plan on a changed machine.

    Attributes:
        name: What is twice as much.
        best: The best Plan there.
    """

    name: str
    best: Candidate


@dataclass(frozen=True, slots=True)
class Explanation:
    """Of the best Plan.

    Attributes:
        winner: The Plan.
        room: Bytes of a device's memory that Plans may fill.
        unlimited: The best Plan if memory were without limit.
        neighbours: By degree, half and twice its value.
        other: The best Plan of another kind: with other degrees above 1; None if none fits.
        changes: Of the machine, the one that gains most first.
    """

    winner: Candidate
    room: float
    unlimited: Candidate
    neighbours: tuple[Neighbour, ...]
    other: Candidate | None
    changes: tuple[Change, ...]

    def sentences(self) -> Iterator[str]:
        """All of it, in words."""
        yield self._bounds()
        yield self._memory()
        yield from self._degrees()
        yield self._runner_up()
        yield from self._changes()

    def _bounds(self) -> str:
        winner = self.winner
        shares = sorted(_parts(winner).items(), key=lambda item: -item[1])
        (first, most), *rest = [(_PART_NAMES[name], part / winner.seconds) for name, part in shares]
        others = [f"{name} {share:.1%}" for name, share in rest if share >= 0.005]
        after = f"; then come {_joined(others)}" if others else ""
        return f"{_capital(first)} bounds it, with {most:.1%} of the step{after}."

    def _memory(self) -> str:
        winner, free = self.winner, self.unlimited
        held, room = (format_bytes(round(each)) for each in (winner.memory.peak, self.room))
        held = f"A device holds {held} of {room} at most"
        if free.plan == winner.plan or free.seconds > 0.999 * winner.seconds:
            return f"{held}, and more memory would gain nothing."
        return f"{held}; without that limit {free.layout} would be {_faster(winner, free)} faster."

    def _degrees(self) -> Iterator[str]:
        for name in dict.fromkeys(each.degree for each in self.neighbours):
            told = []
            for each in self.neighbours:
                if each.degree != name:
                    continue
                if each.best is None:
                    told.append(f"with {each.value} nothing fits the memory")
                    continue
                slower = each.best.seconds / self.winner.seconds - 1
                told.append(f"with {each.value} the best is {slower:.1%} slower ({_degrees_text(each.best)})")
            yield f"{name}={getattr(self.winner.degrees, name)}: {', '.join(told)}."

    def _runner_up(self) -> str:
        other, winner = self.other, self.winner
        if other is None:
            return "No Plan of another kind fits the memory."
        name, more = _most_added(winner, other)
        slower = other.seconds / winner.seconds - 1
        why = f"{_PART_NAMES[name]} takes {format_seconds(more)} more of it" if more > 0 else "by a hair"
        return f"Of another kind, {other.layout} is best, and {slower:.1%} slower: {why}."

    def _changes(self) -> Iterator[str]:
        idle = [each.name for each in self.changes if each.best.seconds > 0.999 * self.winner.seconds]
        for change in self.changes:
            if change.name in idle:
                continue
            gain = _faster(self.winner, change.best)
            again = "under the same Plan"
            if change.best.plan != self.winner.plan:
                again = f"with {_degrees_text(change.best)},shard={change.best.plan.shard}"
            yield f"Twice {change.name}: {gain} faster, {again}."
        if idle:
            yield f"Twice {_joined(idle)} would gain nothing."


def explain(search: Search, winner: Candidate) -> Explanation:
    """Explains the best Plan of a search by others.

    Args:
        search: That found it.
        winner: The best.
    """
    unlimited = Search(search.workload, search.cluster, search.batch, margin=-math.inf).best(1).best
    assert unlimited is not None, "what fits a limit fits without it"
    changes = []
    for name, cluster in _doubled(search.cluster):
        best = Search(search.workload, cluster, search.batch, margin=search.margin).best(1).best
        if best is not None:
            changes.append(Change(name, best))
    changes.sort(key=lambda change: change.best.seconds)
    kind = _kind(winner.degrees)
    other = search.best(1, lambda degrees: _kind(degrees) != kind).best
    return Explanation(
        winner,
        search.room,
        unlimited,
        tuple(_neighbours(search, winner)),
        other,
        tuple(changes),
    )


def _neighbours(search: Search, winner: Candidate) -> Iterator[Neighbour]:
    for name in Degrees._fields:
        value = getattr(winner.degrees, name)
        for other in ([value // 2] if value % 2 == 0 else []) + [2 * value]:

            def accept(degrees: Degrees, name: str = name, other: int = other) -> bool:
                return bool(getattr(degrees, name) == other)

            ranking = search.best(1, accept)
            if ranking.legal:
                yield Neighbour(name, other, ranking.best)


def _doubled(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The machine with one thing twice as much."""
    device, (inner, *outer) = cluster.device, cluster.levels
    twice = [replace(level, bandwidth=2 * level.bandwidth) for level in outer]
    if outer:
        yield "the network's rate", cluster.replace(levels=(inner, *twice))
    if inner.devices > 1:
        faster = replace(inner, bandwidth=2 * inner.bandwidth)
        yield "the rate of the links in a node", cluster.replace(levels=(faster, *outer))
    if outer and outer[0].devices % (2 * inner.devices) == 0:
        wider = replace(inner, devices=2 * inner.devices)
        yield "the devices in a node", cluster.replace(levels=(wider, *outer))
    yield "the memory", cluster.replace(device=replace(device, memory=2 * device.memory))
    peak = {name: 2 * rate for name, rate in device.peak.items()}
    yield "the FLOP/s", cluster.replace(device=replace(device, peak=peak))
    bandwidth = replace(device, bandwidth=2 * device.bandwidth)
    yield "the memory's rate", cluster.replace(device=bandwidth)


def _kind(degrees: Degrees) -> frozenset[str]:
    """Which techniques a layout uses beside data parallelism."""
    return frozenset(name for name in Degrees._fields if name != "dp" and getattr(degrees, name) > 1)


def _parts(candidate: Candidate) -> dict[str, float]:
    return {"compute": candidate.cost.compute, **candidate.cost.parts}


def _most_added(winner: Candidate, other: Candidate) -> tuple[str, float]:
    """The part of a step on which another Plan spends most more."""
    mine, theirs = _parts(winner), _parts(other)
    name = max(theirs, key=lambda part: theirs[part] - mine[part])
    return name, theirs[name] - mine[name]


def _faster(winner: Candidate, other: Candidate) -> str:
    return f"{winner.seconds / other.seconds - 1:.1%}"


def _degrees_text(candidate: Candidate) -> str:
    degrees = candidate.degrees._asdict().items()
    return ",".join(f"{name}={value}" for name, value in degrees if value > 1) or "dp=1"


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
