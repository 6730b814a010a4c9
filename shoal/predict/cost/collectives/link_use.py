"""Which links the instances of a group pattern use: counts only, from where ranks sit.

Rank r sits in group r // d of a level whose full groups have d devices; the last group may be a part of one.
Instances of a pattern (`Group`) cover all ranks, and where a level's size is no multiple of the pattern's,
they lie differently: of the groups of six ranks on nodes of eight, the first has one node, the second has two
ranks in that node and four in the next. `crossings` returns every different way in which an instance lies.

Most patterns are even at a level: each group of the level that has members has as many. Counts then follow
from sizes alone. If a pattern is uneven at one level only, the even groups inside it are units, and counts
follow from the unit at which an instance begins. All other patterns are counted rank by rank.

Which links join the ranks of two places along a pipeline, by where each pair of them really sits.

Ranks fill the groups of each level in order: rank r is in group r // devices of a level. Two ranks that are
`d` apart are in one group or in two, as they lie; of all pairs the farthest decides how long a message takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm
from typing import TYPE_CHECKING, NamedTuple

from shoal.predict.cost.layout import Layout
from shoal.spec.cluster import Cluster, Level
from shoal.spec.plan import Boundary, Group
from shoal.spec.workload import Workload

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, order=True)
class Crossing:
    """How one instance of a pattern uses one level.

    A part is the members in one group of the level inside (or one device).

    Attributes:
        level: Index of the level.
        parts: The most parts that one group of the level joins.
        inside: Members in the smallest part.
        members: Members in the smallest group of the level that joins two parts or more.
        hops: Steps over these links on the way through all members in order of rank.
        others: The most other members that a member reaches over these links.
        steps: Other members that the member reaches over these links which has most of them outside.
        displaced: The most of the `others` that have another place in their node, for one member.
    """

    level: int
    parts: int
    inside: int
    members: int
    hops: int
    others: int
    steps: int
    displaced: int


def counted_crossings(group: Group, sizes: Sequence[int], has_rails: bool) -> Iterator[tuple[Crossing, ...]]:
    """Yield the levels that each instance uses, innermost first.

    The arguments are those of `shoal.predict.cost.collectives.link_use.crossings`.
    """
    import numpy as np  # imported here, so that planning of other patterns starts without it

    ranks = _instances(group, sizes)
    place = ranks % sizes[0]
    alone = np.ones_like(ranks)
    inner = _Joined(np.arange(ranks.size).reshape(ranks.shape), alone, alone)
    columns, reached = [], []
    for level, size in enumerate(sizes):
        block = ranks // size if level < len(sizes) - 1 else np.zeros_like(ranks)
        outer = _joined(block, place if has_rails else None)
        others = outer.members - inner.members
        uses = others > 0
        parts = np.bincount(outer.which.ravel(), _firsts(inner.which).ravel())[outer.which]
        displaced = others - (outer.alike - inner.alike) if has_rails and level else 0 * others
        hops = _firsts(inner.which).sum(1) - _firsts(outer.which).sum(1)
        columns.append(
            (
                parts.max(1).astype(int),
                np.where(uses, inner.members, group.size).min(1),
                np.where(uses, outer.members, group.size).min(1),
                hops,
                others.max(1),
                displaced.max(1),
            )
        )
        reached.append(others)
        inner = outer
    steps = _steps_of_outermost(reached)
    for instance in range(len(ranks)):
        yield tuple(
            Crossing(level, *(int(each[instance]) for each in (*some, steps[level], displaced)))
            for level, (*some, displaced) in enumerate(columns)
            if some[3][instance]
        )


class _Joined(NamedTuple):
    """The groups of one level that members of instances are in, each array [instances, size].

    Attributes:
        which: Number of the group that a member is in; all instances have other numbers.
        members: Members in that group.
        alike: Members in that group with the member's place in its node.
    """

    which: np.ndarray
    members: np.ndarray
    alike: np.ndarray


def _joined(block: np.ndarray, place: np.ndarray | None) -> _Joined:
    """Return the groups of members, by the number of each member's group in its instance."""
    import numpy as np

    which = np.cumsum(_firsts(block).ravel()).reshape(block.shape) - 1
    members = np.bincount(which.ravel())[which]
    if place is None:
        return _Joined(which, members, members)
    places = which * (place.max() + 1) + place
    _, kind, counts = np.unique(places, return_inverse=True, return_counts=True)
    return _Joined(which, members, counts[kind.reshape(which.shape)])


def _firsts(block: np.ndarray) -> np.ndarray:
    """Return which members are the first of their group in their instance."""
    import numpy as np

    found: np.ndarray = np.diff(block, axis=1, prepend=-1) != 0
    return found


def _steps_of_outermost(reached: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return how many others each instance's outermost member reaches over each level.

    It is the one that reaches most over the last level, and of these the one that does over the level before.
    """
    import numpy as np

    chosen = np.ones_like(reached[-1], dtype=bool)
    steps = []
    for others in reversed(reached):
        most = np.where(chosen, others, -1).max(1)
        chosen &= others == most[:, None]
        steps.append(most)
    return steps[::-1]


def _instances(group: Group, sizes: Sequence[int]) -> np.ndarray:
    """Return the ranks of one instance of each way to lie, [instances, size].

    Levels but the last repeat after as many ranks as their least common multiple.
    """
    import numpy as np

    if group.outer:
        return np.array(group.tile(sizes[-1]))
    span, period, devices = group.size // group.run * group.stride, lcm(*sizes[:-1]), sizes[-1]
    tiles = np.arange(max(1, devices // span)) * span
    last = min(group.stride - group.run, devices - (span - group.stride + group.run))  # of the first ranks
    offsets = np.arange(0, max(0, last) + 1, group.run)
    starts = (tiles[:, None] + offsets).ravel() % period
    if group.run == 1:  # between two multiples of what divides stride and levels, instances lie alike
        starts -= starts % gcd(group.stride, *sizes[:-1])
    starts = np.unique(starts)
    runs = np.arange(0, span, group.stride)[:, None] + np.arange(group.run)
    found: np.ndarray = starts[:, None] + runs.ravel()
    return found


@lru_cache(maxsize=1 << 14)
def crossings(
    group: Group, sizes: tuple[int, ...], has_rails: bool = False
) -> tuple[tuple[Crossing, ...], ...]:
    """Return the levels that instances of a pattern use, innermost first, for each way in which they lie.

    Args:
        group: A pattern of two ranks or more.
        sizes: Devices in a full group of each level, innermost first. The last has all devices; each of the
            others divides the next of them.
        has_rails: Whether places in nodes count; otherwise `displaced` is 0.
    """
    if group.stride == group.run > 1:
        return crossings(Group(group.size), sizes, has_rails)  # runs without gaps
    if group.outer and (has_rails or not all(_is_aligned(group, size) for size in sizes[:-1])):
        return tuple(sorted(set(counted_crossings(group, sizes, has_rails))))
    members = (*(_members_if_even(group, size) for size in sizes[:-1]), group.size)
    uneven = [level for level, each in enumerate(members) if each is None]
    even = [each for each in members[: uneven[0] if uneven else None] if each is not None]
    if has_rails and (uneven[:1] == [0] or not _has_equal_places(group, sizes[0])):
        return tuple(sorted(set(counted_crossings(group, sizes, True))))
    if not uneven:
        return (_of_even(group.size, even, has_rails),)
    units = _units(group, sizes, uneven[0])
    if units is None or members[uneven[0] + 1] != group.size:
        return tuple(sorted(set(counted_crossings(group, sizes, has_rails))))
    occupied = {_occupied(units, start) for start in _different(units)}
    ways = (_of_uneven(group.size, even, units.members, each, has_rails) for each in occupied)
    return tuple(sorted(ways))


def joined_by(group: Group, sizes: tuple[int, ...]) -> int:
    """Return the index of the innermost level that joins all members of every instance; 0 for one rank."""
    if group.size == 1:
        return 0
    return max(lain[-1].level for lain in crossings(group, sizes))


def _is_aligned(group: Group, size: int) -> bool:
    """Return whether each dim of a nested pattern lies within groups of `size` devices, or fills them."""
    return all(
        size % (number * stride) == 0
        or stride % size == 0
        or (size % stride == 0 and number * stride % size == 0)
        for number, stride in group.dims
    )


def _span(group: Group) -> int:
    """Return the number of ranks from the first of an instance to the first of the next beyond it."""
    return group.size // group.run * group.stride


def _members_if_even(group: Group, size: int) -> int | None:
    """Return how many members each group of `size` devices with members has; None if the numbers differ."""
    if group.outer:
        return group.within(size)
    if size % _span(group) == 0:
        return group.size
    if group.run == 1 and group.stride >= size:
        return 1
    if group.stride % group.run:
        return None
    if size % group.stride == 0 and _span(group) % size == 0:
        return size // group.stride * group.run
    if group.stride % size == 0 and (size % group.run == 0 or group.run % size == 0):
        return min(group.run, size)
    return None


def _has_equal_places(group: Group, node: int) -> bool:
    """Return whether members have the same places in each node, if each node has as many."""
    return node % group.stride == 0 or group.stride % node == 0


def _of_even(size: int, members: Sequence[int], has_rails: bool) -> tuple[Crossing, ...]:
    """Return the levels whose groups have so many members each, of a pattern of `size` ranks.

    Each node then has the same places.
    """
    found, inside = [], 1
    for level, each in enumerate(members):
        if each > inside:
            others, hops = each - inside, size // inside - size // each
            displaced = others - others // members[0] if has_rails and level else 0
            found.append(Crossing(level, each // inside, inside, each, hops, others, others, displaced))
            inside = each
    return tuple(found)


class _Units(NamedTuple):
    """A pattern as units of equally many members, in a row at one distance, each in one group of a level.

    Attributes:
        members: Members of a unit.
        number: Units of an instance.
        stride: Distance from each unit to the next.
        devices: Units in one full group of the uneven level.
        starts: Units of such a group at which instances begin.
    """

    members: int
    number: int
    stride: int
    devices: int
    starts: Iterable[int]


class _Occupied(NamedTuple):
    """Units in the groups of the uneven level that an instance has units in.

    Attributes:
        groups: Number of these groups.
        least: Fewest units in one of them.
        most: Most units in one of them.
        joined: Fewest units in one of them that has two or more; 0 if none has.
    """

    groups: int
    least: int
    most: int
    joined: int


def _units(group: Group, sizes: Sequence[int], level: int) -> _Units | None:
    """Return the units of a pattern that is even at all levels inside this one; None if runs are uneven."""
    span, runs, unit = _span(group), group.size // group.run, sizes[level - 1] if level else 1
    tiles = max(1, sizes[-1] // span)
    last = max(0, min(group.stride - group.run, sizes[-1] - (span - group.stride + group.run)))
    if unit % group.stride == 0 and span % unit == 0:
        devices, number = sizes[level] // unit, span // unit
        return _Units(group.size // number, number, 1, devices, _starts(tiles, number, 1, 1, devices))
    if sizes[level] % group.run == 0 and group.stride % group.run == 0:
        devices, stride, span = (each // group.run for each in (sizes[level], group.stride, span))
        starts = _starts(tiles, span, last // group.run + 1, 1, devices)
        return _Units(group.run, runs, stride, devices, starts)
    if runs == 1 and group.run % unit == 0:
        devices, width, span = (each // unit for each in (sizes[level], group.run, span))
        return _Units(unit, width, 1, devices, _starts(tiles, span, last // group.run + 1, width, devices))
    return None


def _starts(tiles: int, span: int, offsets: int, width: int, devices: int) -> Iterable[int]:
    """Return the different remainders by `devices` of t * span + o * width, for so many t and o from 0."""
    step = gcd(span, devices)
    tiles, offsets = min(tiles, devices // step), min(offsets, devices // gcd(width, devices))
    if width == 1 and offsets >= step and tiles == devices // step:
        return range(devices)
    return {(t * span + o * width) % devices for t in range(tiles) for o in range(offsets)}


def _different(units: _Units) -> Iterable[int]:
    """Return starts at which instances may lie in different ways.

    Between two multiples of what divides stride and devices, they lie as at the lower one.
    """
    alike = gcd(units.stride, units.devices)
    if isinstance(units.starts, range):
        return range(0, units.devices, alike)
    return {start - start % alike for start in units.starts}


def _occupied(units: _Units, start: int) -> _Occupied:
    """Return the units in each group of the uneven level, for the instance that begins at a unit."""
    _, number, stride, devices, _ = units
    if stride >= devices:
        return _Occupied(number, 1, 1, 0)
    groups = (start + (number - 1) * stride) // devices + 1
    repeated = stride // gcd(stride, devices)  # groups in the middle, until their numbers of units repeat
    before = [
        0,
        *(-((start - devices * each) // stride) for each in range(1, min(groups - 1, repeated + 1) + 1)),
    ]
    counts = {two - one for one, two in pairwise(before)}
    counts.add(number + (start - devices * (groups - 1)) // stride if groups > 1 else number)
    return _Occupied(groups, min(counts), max(counts), min((each for each in counts if each > 1), default=0))


def _of_uneven(
    size: int, members: Sequence[int], unit: int, occupied: _Occupied, has_rails: bool
) -> tuple[Crossing, ...]:
    """Return the levels of an instance: even ones, the uneven one, and the one that joins all members.

    Args:
        size: Ranks of the pattern.
        members: Members in each group of the even levels.
        unit: Members of a unit.
        occupied: Units in the groups of the uneven level.
        has_rails: Whether places in nodes count.
    """
    found, level, part = list(_of_even(size, members, has_rails)), len(members), max([1, *members])
    least, most = occupied.least * unit, occupied.most * unit

    def displaced(others: int) -> int:
        return others - others // members[0] if has_rails else 0

    if most > part:
        joined = least if unit > part else occupied.joined * unit
        hops, others, steps = size // part - occupied.groups, most - part, least - part
        found.append(Crossing(level, most // part, part, joined, hops, others, steps, displaced(others)))
    if occupied.groups > 1:
        others, hops = size - least, occupied.groups - 1
        found.append(
            Crossing(level + 1, occupied.groups, least, size, hops, others, others, displaced(others))
        )
    return tuple(found)


@lru_cache(maxsize=1 << 14)
def joining_level(boundary: Boundary, cluster: Cluster) -> Level:
    """Return the links that the farthest pair of ranks needs."""
    for level in cluster.levels[:-1]:
        if not boundary.crosses(level.devices):
            return level
    return cluster.levels[-1]


def message_seconds(nbytes: float, boundary: Boundary, cluster: Cluster) -> float:
    """Return the seconds of a message over the links that the farthest pair of ranks needs.

    Over rails, bytes for a device at another place of its node pass the links in the sender's node first.
    """
    (level, is_displaced), inside = _way_of(boundary, cluster), cluster.levels[0]
    seconds = inside.setup + level.latency + nbytes / level.rate(2)
    if is_displaced:
        seconds += inside.latency + nbytes / inside.rate(2)
    return seconds


def alike_boundaries(
    pp: Group, stage: Group, placement: Sequence[int], cluster: Cluster
) -> tuple[Boundary | None, ...]:
    """Return, for each stage but the last, a boundary whose messages take as long as those to the next stage.

    Args:
        pp: The ranks along the pipeline.
        stage: The ranks of one stage.
        placement: The place of each stage along the pipeline. Where two stages are at one place, the result
            has None.
        cluster: The machines.
    """
    alike: dict[tuple[Level, bool], Boundary] = {}
    found: dict[tuple[int, int], Boundary | None] = {}
    pairs = list(pairwise(placement))
    for pair in set(pairs):
        boundary = Boundary.between(pp, stage, *pair)
        found[pair] = None if pair[0] == pair[1] else alike.setdefault(_way_of(boundary, cluster), boundary)
    return tuple([found[pair] for pair in pairs])


def _way_of(boundary: Boundary, cluster: Cluster) -> tuple[Level, bool]:
    """Return the links that join the ranks, and whether bytes pass those in the sender's node before."""
    level = joining_level(boundary, cluster)
    return level, level.rails and boundary.distance % cluster.levels[0].devices > 0


def message_bytes(layout: Layout, workload: Workload) -> float:
    """Return the bytes of hidden state that one rank sends to the next stage for a micro-batch."""
    nbytes = float(layout.width) * layout.microbatch * workload.length / layout.cp * workload.hidden
    return nbytes if layout.tensor == "plain" else nbytes / layout.tp
