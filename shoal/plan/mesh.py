"""The device mesh of a Plan: rank arithmetic, without process groups.

Ranks are laid out row by row over the axes `pp, replicate, shard, cp, tp`, outermost first, so that
neighbours along `tp` are neighbours in the node. A Plan's `order` puts the axes in another order. `dp` names
the pair `replicate, shard`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from shoal.plan.order import AXES, axes_of
from shoal.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks laid out over the axes of a Plan.

    Attributes:
        sizes: Number of ranks along each of `AXES`.
        order: The axes, outermost first.
    """

    sizes: tuple[int, ...]
    order: tuple[str, ...] = AXES

    @classmethod
    def of(cls, plan: Plan) -> Mesh:
        """Return the mesh of a Plan. Without sharding, all of `dp` lies on the axis `replicate`."""
        return cls((plan.pp, plan.replicas, plan.shards, plan.cp, plan.tp), axes_of(plan.order))

    @property
    def ranks(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.sizes)

    def coordinate(self, rank: int, *axes: str) -> int:
        """Return the position of a rank along one axis, or along several together, outermost first."""
        return self._flat(self._coordinates(rank), axes)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along these axes, itself included, in mesh order."""
        return next(group for group in self.groups(*axes) if rank in group)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups along these axes, each in mesh order; every rank is in exactly one."""
        varying = [self.order.index(axis) for axis in self._expand(axes)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(itertools.product(*map(range, self._ordered))):
            fixed = tuple(index for axis, index in enumerate(place) if axis not in varying)
            groups.setdefault(fixed, []).append(rank)
        return [tuple(group) for group in groups.values()]

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        place = []
        for size in reversed(self._ordered):
            rank, index = divmod(rank, size)
            place.append(index)
        return tuple(reversed(place))

    def _flat(self, place: tuple[int, ...], axes: tuple[str, ...]) -> int:
        position = 0
        for axis in self._expand(axes):
            index = self.order.index(axis)
            position = position * self._ordered[index] + place[index]
        return position

    @property
    def _ordered(self) -> tuple[int, ...]:
        """Number of ranks along each axis of `order`."""
        return tuple(self.sizes[AXES.index(axis)] for axis in self.order)

    def _expand(self, axes: tuple[str, ...]) -> list[str]:
        named = [part for axis in axes for part in (("replicate", "shard") if axis == "dp" else (axis,))]
        return sorted(named, key=self.order.index)
