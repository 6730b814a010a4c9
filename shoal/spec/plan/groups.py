"""The groups of ranks that communicate under a Plan, for each axis and each family of parameters.

All groups of an axis are one pattern with different first ranks, because ranks stand row by row on the axes,
in the Plan's `order` (`shoal.spec.plan.groups`). `shoal.parallel.axes` makes process groups of them; the
cost model looks up which links such a pattern uses.

There are three families of parameters. They differ in the ranks that hold equal values and see other data:

    dense      those that tp divides, and all others where tp=1: the ranks of dp x cp
    whole      those that every rank of tp has, with tp > 1: dp x cp x tp
    experts    with ep > 1: every ep-th rank of dp x cp in the mesh's order, times tp

A sharded state is cut over dp / replicate x cp ranks, and an expert's over ep times fewer; the other ranks of
its family hold replicas. The ranks of one replica are a worker. If workers make steps by themselves
(`exchange=local`), gradients are summed within a worker only.

The device mesh of a Plan: rank arithmetic, without process groups.

Ranks are laid out row by row over the axes `pp, replicate, shard, cp, tp`, outermost first, so that
neighbours along `tp` are neighbours in the node. A Plan's `order` puts the axes in another order. `dp` names
the pair `replicate, shard`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from shoal.spec.plan.allowed_values import AXES, DEFAULT_ORDER, axes_of, strides_of
from shoal.spec.plan.group import Dim, Group, split_dims
from shoal.spec.plan.plan import Plan


def tensor_group(tp: int) -> Group:
    """Return the group of ranks with other parts of the same layers."""
    return Group(tp)


def context_group(tp: int, cp: int) -> Group:
    """Return the group of ranks with other parts of the same samples."""
    return Group(cp, tp)


def expert_group(tp: int, ep: int) -> Group:
    """Return the group of ranks with other experts: neighbours in dp x cp."""
    return Group(ep, tp)


class FamilyGroups(NamedTuple):
    """The ranks over which a family's parameters are kept.

    Attributes:
        shards: The ranks that together hold one state.
        replicas: The ranks that hold the same shard.
        summed: Those of them whose gradients are summed in a step.
    """

    shards: Group
    replicas: Group
    summed: Group


class Groups:
    """The groups of a Plan; each is made when it is first asked for."""

    def __init__(self, mesh: _Mesh) -> None:
        self._mesh = mesh
        self._together = () if mesh.are_apart else ("replicate",)
        self._cut = ("shard", "cp") if mesh.is_cut else ()
        self._copied = ("replicate",) if mesh.is_cut else ("replicate", "cp")

    @classmethod
    def of(cls, plan: Plan) -> Groups:
        """Return the groups of a Plan."""
        return _groups(
            _Mesh(
                (plan.pp, plan.replicas, plan.shards, plan.cp, plan.tp),
                plan.ep,
                plan.sharding.cuts_optimizer,
                plan.tensor != "plain",
                plan.order,
                plan.exchange in ("local", "server"),
            )
        )

    @classmethod
    def of_pipeline(cls, plan: Plan) -> Groups:
        """Return groups whose `pp` and `stage` are those of a Plan, whatever its sharding and exchange."""
        return cls.of_mesh((plan.pp, 1, plan.dp, plan.cp, plan.tp), 1, is_cut=False, order=plan.order)

    @classmethod
    def of_mesh(cls, sizes: tuple[int, ...], ep: int, *, is_cut: bool, order: str = DEFAULT_ORDER) -> Groups:
        """Return the groups of a mesh whose ranks make each step together.

        Args:
            sizes: Number of ranks along each of `AXES`.
            ep: Expert-parallel degree.
            is_cut: Whether states are sharded.
            order: The order of the axes.
        """
        return _groups(_Mesh(sizes, ep, is_cut, True, order, False))

    @cached_property
    def world(self) -> Group:
        """All ranks."""
        return self._along(*AXES)

    @cached_property
    def dp(self) -> Group:
        """Ranks with other samples."""
        return self._along("replicate", "shard")

    @cached_property
    def data(self) -> Group:
        """Ranks with other samples, or other parts of them: dp x cp."""
        return self._along("replicate", "shard", "cp")

    @cached_property
    def cp(self) -> Group:
        """Ranks with other parts of the same samples."""
        return self._along("cp")

    @cached_property
    def tp(self) -> Group:
        """Ranks with other parts of the same layers."""
        return self._along("tp")

    @cached_property
    def sequence(self) -> Group:
        """Ranks that split the same sequences between blocks: cp, and tp if it splits them too."""
        return self._along("cp", "tp") if self._mesh.is_split else self._along("cp")

    @cached_property
    def ep(self) -> Group:
        """Ranks with other experts."""
        return Group.along(self._parted[1])

    @cached_property
    def pp(self) -> Group:
        """Ranks with other stages of the same samples."""
        return self._along("pp")

    @cached_property
    def stage(self) -> Group:
        """All ranks of one stage."""
        return self._along("replicate", "shard", "cp", "tp")

    @cached_property
    def parts(self) -> Group:
        """Ranks that together hold one whole state of the model."""
        # If a state is not sharded, its experts are on several ranks.
        held = self._dims(*self._cut) if self._mesh.is_cut else self._parted[1]
        return _nested(held, self._dims("pp", "tp"))

    @cached_property
    def workers(self) -> Group:
        """Ranks at the same place in other workers."""
        return self._along("replicate")

    @cached_property
    def in_step(self) -> Group:
        """Ranks that make a step together: all, or those of one worker."""
        return self._along("pp", *self._together, "shard", "cp", "tp")

    @cached_property
    def averaged(self) -> Group:
        """Those ranks of `data` whose gradients are averaged in a step."""
        return self._along(*self._together, "shard", "cp")

    @cached_property
    def stage_in_step(self) -> Group:
        """Those ranks of `stage` that make a step together."""
        return self._along(*self._together, "shard", "cp", "tp")

    @cached_property
    def dense(self) -> FamilyGroups:
        """Groups of the parameters that tp divides."""
        return FamilyGroups(self._along(*self._cut), self._along(*self._copied), self._along(*self._summed))

    @cached_property
    def whole(self) -> FamilyGroups:
        """Groups of the parameters that every rank of tp has."""
        return FamilyGroups(
            self._along(*self._cut), self._along(*self._copied, "tp"), self._along(*self._summed, "tp")
        )

    @cached_property
    def experts(self) -> FamilyGroups:
        """Groups of the parameters of experts."""
        others, is_cut = self._parted[0], self._mesh.is_cut
        return FamilyGroups(
            Group.along(others) if is_cut else Group(1),
            _nested(self._dims("replicate") if is_cut else others, self._dims("tp")),
            _nested(self._dims(*self._together) if is_cut else others, self._dims("tp")),
        )

    @property
    def _summed(self) -> tuple[str, ...]:
        return tuple(axis for axis in self._copied if axis != "replicate") + self._together

    @cached_property
    def _parted(self) -> tuple[list[Dim], list[Dim]]:
        parted = split_dims(self._dims(*(self._cut or self._copied)), self._mesh.ep)
        assert parted is not None, "Plan checks ep"
        return parted

    @cached_property
    def _dim_of(self) -> dict[str, Dim]:
        """Return the dim of each axis, outermost first."""
        numbers = dict(zip(AXES, self._mesh.sizes, strict=True))
        strides = strides_of(self._mesh.order, numbers)
        return {axis: (numbers[axis], strides[axis]) for axis in axes_of(self._mesh.order)}

    def _dims(self, *axes: str) -> list[Dim]:
        return [dim for axis, dim in self._dim_of.items() if axis in axes]

    def _along(self, *axes: str) -> Group:
        return Group.along(self._dims(*axes))


class _Mesh(NamedTuple):
    """What the groups of a Plan depend on.

    Attributes:
        sizes: Number of ranks along each of `AXES`.
        ep: Expert-parallel degree.
        is_cut: Whether states are sharded.
        is_split: Whether tp splits the sequence.
        order: The order of the axes over the ranks.
        are_apart: Whether workers make steps by themselves.
    """

    sizes: tuple[int, ...]
    ep: int
    is_cut: bool
    is_split: bool
    order: str
    are_apart: bool


_groups = lru_cache(maxsize=1 << 14)(Groups)


def _nested(*dims: list[Dim]) -> Group:
    """Return the pattern along all these dims, given in any order."""
    return Group.along(sorted(itertools.chain(*dims), key=lambda each: each[1], reverse=True))


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


@lru_cache(maxsize=1 << 10)
def _places(group: Group) -> tuple[int, ...]:
    """Return the first rank at each place along the pipeline."""
    return group.ranks(0)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Pairs of ranks with equal coordinates on all axes but `pp`: the first of each pair sends to the second.

    The k-th rank of `pattern` from `sender` sends to the k-th rank of `pattern` from `receiver`, so all pairs
    are equally far apart in rank numbers. Where they sit on links differs.

    Attributes:
        sender: The first rank that sends.
        receiver: The first rank that receives.
        pattern: The ranks of one stage.
    """

    sender: int
    receiver: int
    pattern: Group

    @classmethod
    def of(cls, plan: Plan, sender: int, receiver: int) -> Self:
        """Return the pairs between two places along `pp`.

        Args:
            plan: The Plan, which says the degrees and their order.
            sender: Place of the ranks that send, from 0 to pp - 1.
            receiver: Place of the ranks that receive.
        """
        groups = Groups.of_pipeline(plan)
        return cls.between(groups.pp, groups.stage, sender, receiver)

    @classmethod
    def between(cls, pp: Group, stage: Group, sender: int, receiver: int) -> Self:
        """Return the pairs between two places along a pipeline, from its ranks and those of a stage."""
        places = _places(pp)
        return cls(places[sender], places[receiver], stage)

    @property
    def distance(self) -> int:
        """Number of ranks from a sender to its receiver, in either direction."""
        return abs(self.receiver - self.sender)

    def pairs(self) -> list[tuple[int, int]]:
        """Return all pairs of a sender and a receiver, as global ranks."""
        return list(zip(self.pattern.ranks(self.sender), self.pattern.ranks(self.receiver), strict=True))

    def crosses(self, devices: int) -> bool:
        """Return whether the ranks of some pair sit in different groups of `devices` neighbouring ranks.

        The links that join such groups are then used: for the farthest pair, those of the outermost level
        for which this holds of the level inside it. It takes no time that grows with the number of pairs
        where the Plan's distances and `devices` divide each other.
        """
        if self.distance == 0 or self.distance >= devices:
            return self.distance > 0
        *outer, (run, stride) = self.pattern.dims or ((1, 1),)
        if stride > 1:
            outer, run = [*outer, (run, stride)], 1
        # Places of the first rank of each run in its group of devices.
        places = {min(self.sender, self.receiver) % devices}
        for number, apart in outer:
            different = min(number, devices // math.gcd(apart, devices))
            places = {(place + index * apart) % devices for place in places for index in range(different)}
        return any(place + run - 1 + self.distance >= devices for place in places)
