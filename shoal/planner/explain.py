"""Explain the best Plan: its limits, the effect of each degree, what loses, and what to change.

Every figure comes from a search of its own: with one degree held at half or twice its value, among other
kinds of layout, or on a machine with one property doubled (there only among degrees of half to twice the
best's, as doubling a property moves them no further). No figure is a rule of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.cluster import Cluster
from shoal.plan import SettledPlan
from shoal.planner.candidate import Candidate
from shoal.planner.search import Search
from shoal.planner.sizes import Size, half_and_twice, sizes_of
from shoal.planner.space import Degrees
from shoal.simulate import Traffic, traffic_of
from shoal.units import format_bytes, format_seconds

__all__ = ["Change", "Explanation", "Neighbour", "explain"]

_PART_NAMES = {
    "compute": "compute",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert-parallel communication",
    "bubble": "the pipeline's bubble",
    "pipeline": "messages between stages",
    "data": "data-parallel communication",
    "optimizer": "the optimizer",
    "straggler": "waiting for the slowest rank",
}


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The best Plan with one degree at another value.

    Attributes:
        degree: Name of the degree.
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
        name: The doubled property.
        best: The best Plan there.
    """

    name: str
    best: Candidate


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons why the best Plan is the best.

    Attributes:
        winner: The best Plan.
        room: Bytes of a device's memory that Plans may fill.
        unlimited: The best Plan if memory had no limit.
        neighbours: For each degree, the best Plans with half and with twice its value.
        other: The best Plan of another kind: with other degrees above 1; None if none fits.
        changes: Changes of the machine, the one that gains most first.
        sizes: The Plan with half and twice the micro-batch, and with half and twice the buckets.
        traffic: The communication of one rank.
    """

    winner: Candidate
    room: float
    unlimited: Candidate
    neighbours: tuple[Neighbour, ...]
    other: Candidate | None
    changes: tuple[Change, ...]
    sizes: tuple[Size, ...]
    traffic: Traffic

    def sentences(self) -> Iterator[str]:
        """Yield the explanation, in sentences."""
        yield self._bounds()
        yield self._memory()
        yield from self._degrees()
        yield from self._sizes()
        yield self._runner_up()
        yield from self._changes()

    def _bounds(self) -> str:
        winner = self.winner
        shares = sorted(_parts(winner).items(), key=lambda item: -item[1])
        (first, most), *rest = [(_PART_NAMES[name], part / winner.seconds) for name, part in shares]
        others = [f"{name} {share:.1%}" for name, share in rest if share >= 0.005]
        after = f"; next are {_joined(others)}" if others else ""
        return f"{_capital(first)} takes the largest share of the step, {most:.1%}{after}."

    def _memory(self) -> str:
        winner, free = self.winner, self.unlimited
        held, room = (format_bytes(round(each)) for each in (winner.memory.peak, self.room))
        held = f"A device holds at most {held} of {room}"
        if free.plan == winner.plan or free.seconds > 0.999 * winner.seconds:
            return f"{held}; more memory would gain nothing."
        return f"{held}. Without a limit, {free.layout} would be {_faster(winner, free)} faster."

    def _degrees(self) -> Iterator[str]:
        for name in dict.fromkeys(each.degree for each in self.neighbours):
            told = []
            for each in self.neighbours:
                if each.degree != name:
                    continue
                if each.best is None:
                    told.append(f"with {each.value} no Plan fits in memory")
                    continue
                pace = _pace(each.best.seconds / self.winner.seconds - 1)
                told.append(f"with {each.value} the best Plan is {pace} ({each.best.degrees_text})")
            yield f"{name}={getattr(self.winner.degrees, name)}: {', '.join(told)}."

    def _sizes(self) -> Iterator[str]:
        for name in dict.fromkeys(each.setting for each in self.sizes):
            told = [self._size(each) for each in self.sizes if each.setting == name]
            yield f"{name}={_size_text(name, self.winner.plan)}: {', '.join(told)}."

    def _size(self, size: Size) -> str:
        value = _size_text(size.setting, size.plan)
        if not size.fits:
            over = format_bytes(round(size.memory - self.room))
            return f"with {value} the same Plan needs {over} too much memory"
        if abs(size.slower) < 0.0005:
            return f"with {value} the same Plan takes as long"
        pace = "slower" if size.slower > 0 else "faster"
        return f"with {value} the same Plan is {abs(size.slower):.1%} {pace}"

    def _runner_up(self) -> str:
        other, winner = self.other, self.winner
        if other is None:
            return "No Plan of another kind fits in memory."
        name, more = _most_added(winner, other)
        pace = _pace(other.seconds / winner.seconds - 1)
        why = f", because {_PART_NAMES[name]} takes {format_seconds(more)} more" if more > 0 else ""
        return f"The best Plan of another kind is {other.layout}: it is {pace}{why}."

    def _changes(self) -> Iterator[str]:
        idle = [each.name for each in self.changes if each.best.seconds > 0.999 * self.winner.seconds]
        for change in self.changes:
            if change.name in idle:
                continue
            gain = _faster(self.winner, change.best)
            again = "under the same Plan"
            if change.best.plan != self.winner.plan:
                again = f"with {change.best.degrees_text},shard={change.best.plan.shard}"
            yield f"Twice {change.name}: {gain} faster, {again}."
        if idle:
            yield f"Twice {_joined(idle)} would gain nothing."


def explain(search: Search, winner: Candidate) -> Explanation:
    """Explain the best Plan of a search, by comparison with others.

    Args:
        search: The search that found it.
        winner: The best Plan.
    """
    unlimited = search.best(1, room=math.inf).best
    assert unlimited is not None, "what fits a limit fits without it"
    changes = []
    for name, cluster in _doubled(search.cluster):
        best = search.on(cluster).best(1, lambda degrees: _is_near(degrees, winner.degrees)).best
        if best is not None:
            changes.append(Change(name, best))
    roomier = search.best(1, room=2 * search.room).best  # nothing else changes with more memory
    assert roomier is not None, "what fits a limit fits without it"
    changes.append(Change("the memory", roomier))
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
        tuple(sizes_of(search, winner)),
        traffic_of(winner.workload, winner.cluster, winner.plan, winner.batch),
    )


def _neighbours(search: Search, winner: Candidate) -> Iterator[Neighbour]:
    for name in Degrees._fields:
        value = getattr(winner.degrees, name)
        for other in half_and_twice(value):

            def accept(degrees: Degrees, name: str = name, other: int = other) -> bool:
                return bool(getattr(degrees, name) == other)

            ranking = search.best(1, accept)
            if ranking.legal:
                yield Neighbour(name, other, ranking.best)


def _doubled(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield the machine with one property doubled, except memory, which a search takes directly."""
    device, (inner, *outer) = cluster.device, cluster.levels
    twice = [replace(level, bandwidth=2 * level.bandwidth) for level in outer]
    if outer:
        yield "the network's rate", cluster.replace(levels=(inner, *twice))
    if inner.devices > 1:
        faster = replace(inner, bandwidth=2 * inner.bandwidth)
        yield "the rate of the links in a node", cluster.replace(levels=(faster, *outer))
    is_whole = all(level.devices % (2 * inner.devices) == 0 for level in outer)
    if outer and is_whole and not (cluster.failed or cluster.spare or cluster.parts):
        wider = replace(inner, devices=2 * inner.devices)
        yield "the devices in a node", cluster.replace(levels=(wider, *outer))
    peak = {name: 2 * rate for name, rate in device.peak.items()}
    yield "the FLOP/s", cluster.replace(device=replace(device, peak=peak))
    bandwidth = replace(device, bandwidth=2 * device.bandwidth)
    yield "the memory's rate", cluster.replace(device=bandwidth)


def _is_near(degrees: Degrees, others: Degrees) -> bool:
    return all(each <= 2 * other and other <= 2 * each for each, other in zip(degrees, others, strict=True))


def _kind(degrees: Degrees) -> frozenset[str]:
    """Return the techniques that a layout uses beside data parallelism."""
    return frozenset(name for name in Degrees._fields if name != "dp" and getattr(degrees, name) > 1)


def _parts(candidate: Candidate) -> dict[str, float]:
    return {"compute": candidate.cost.compute, **candidate.cost.parts}


def _most_added(winner: Candidate, other: Candidate) -> tuple[str, float]:
    """Return the part of a step to which another Plan adds most time, and how much."""
    mine, theirs = _parts(winner), _parts(other)
    name = max(theirs, key=lambda part: theirs[part] - mine[part])
    return name, theirs[name] - mine[name]


def _faster(winner: Candidate, other: Candidate) -> str:
    return f"{winner.seconds / other.seconds - 1:.1%}"


def _size_text(setting: str, plan: SettledPlan) -> str:
    """Return a size as a Plan writes it."""
    return format_bytes(plan.bucket) if setting == "bucket" else str(plan.microbatch)


def _pace(slower: float) -> str:
    return f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
