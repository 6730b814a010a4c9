"""Crossings of any pattern, counted from the ranks of all instances at once, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, lcm
from typing import TYPE_CHECKING, NamedTuple

from shoal.cost.collectives.crossing import Crossing
from shoal.plan import Group

if TYPE_CHECKING:
    import numpy as np


def counted_crossings(group: Group, sizes: Sequence[int], has_rails: bool) -> Iterator[tuple[Crossing, ...]]:
    """Yield the levels that each instance uses, innermost first.

    The arguments are those of `shoal.cost.collectives.crossings.crossings`.
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
