"""The groups of ranks that communicate under a Plan, for each axis and each family of parameters.

All groups of an axis are one pattern with different first ranks, because ranks stand row by row on the axes
`pp, replicate, shard, cp, tp` (`shoal.plan.mesh`). `shoal.parallel.axes` makes process groups of them; the
cost model looks up which links such a pattern uses.

There are three families of parameters. They differ in the ranks that hold equal values and see other data:

    dense      those that tp divides, and all others where tp=1: the ranks of dp x cp
    whole      those that every rank of tp has, with tp > 1: dp x cp x tp
    experts    with ep > 1: every ep-th rank of dp x cp, times tp

A sharded state is cut over dp / replicate x cp ranks, and an expert's over ep times fewer; the other ranks of
its family hold replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shoal.plan.plan import Plan

__all__ = ["FamilyGroups", "Group", "Groups", "context_group", "expert_group", "tensor_group"]


@dataclass(frozen=True, slots=True)
class Group:
    """A pattern of ranks that communicate: equal runs of neighbours at equal distances.

    Attributes:
        size: Number of ranks.
        stride: Distance from each run to the next, in the mesh's order.
        run: Number of neighbouring ranks in a run; it divides `size`, and is at most `stride`.
    """

    size: int
    stride: int = 1
    run: int = 1

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Group:
        """Return the pattern of these global ranks, given in any order."""
        first, *others = sorted(ranks)
        run = 1 + sum(1 for index, rank in enumerate(others, 1) if rank == first + index)
        if run == len(ranks):
            return cls(run)
        return cls(len(ranks), others[run - 1] - first, run)

    def ranks(self, first: int) -> tuple[int, ...]:
        """Return the global ranks of the group that begins at `first`."""
        runs = range(first, first + self.size // self.run * self.stride, self.stride)
        return tuple(rank for start in runs for rank in range(start, start + self.run))

    def tile(self, ranks: int) -> list[tuple[int, ...]]:
        """Return all groups of this pattern among `ranks` ranks: every rank is in exactly one."""
        groups = []
        for start in range(0, ranks, self.size // self.run * self.stride):
            groups += [self.ranks(first) for first in range(start, start + self.stride, self.run)]
        return groups


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
    """

    shards: Group
    replicas: Group


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a Plan.

    Attributes:
        world: All ranks.
        dp: Ranks with other samples.
        data: Ranks with other samples, or other parts of them: dp x cp.
        cp: Ranks with other parts of the same samples.
        tp: Ranks with other parts of the same layers.
        sequence: Ranks that split the sequences of the same samples between blocks: cp, and tp if it splits
            them too.
        ep: Ranks with other experts.
        pp: Ranks with other stages of the same samples.
        stage: All ranks of one stage.
        parts: Ranks that together hold one whole state of the model.
        dense: Groups of the parameters that tp divides.
        whole: Groups of the parameters that every rank of tp has.
        experts: Groups of the parameters of experts.
    """

    world: Group
    dp: Group
    data: Group
    cp: Group
    tp: Group
    sequence: Group
    ep: Group
    pp: Group
    stage: Group
    parts: Group
    dense: FamilyGroups
    whole: FamilyGroups
    experts: FamilyGroups

    @classmethod
    def of(cls, plan: Plan) -> Groups:
        """Return the groups of a Plan."""
        shards = plan.shards if plan.sharding.cuts_optimizer else None
        return _groups(plan.pp, plan.dp, plan.cp, plan.tp, plan.ep, shards, plan.tensor != "plain")


@lru_cache(maxsize=1 << 12)
def _groups(pp: int, dp: int, cp: int, tp: int, ep: int, shards: int | None, is_split: bool) -> Groups:
    """Return the groups of a mesh. `shards` is the size of its axis `shard`, None if no state is cut."""
    stage = dp * cp * tp
    cut = 1 if shards is None else shards * cp
    # If a state is not sharded, its experts are on several ranks.
    held = tp * (ep if shards is None else cut)
    cut_experts = max(1, cut // ep)
    return Groups(
        world=Group(pp * stage),
        dp=Group(dp, cp * tp),
        data=Group(dp * cp, tp),
        cp=context_group(tp, cp),
        tp=tensor_group(tp),
        sequence=Group(cp * tp) if is_split else context_group(tp, cp),
        ep=expert_group(tp, ep),
        pp=Group(pp, stage),
        stage=Group(stage),
        parts=Group(pp * held, stage, held),
        dense=FamilyGroups(Group(cut, tp), Group(dp * cp // cut, tp * cut)),
        whole=FamilyGroups(Group(cut, tp), Group(dp * cp // cut * tp, tp * cut, tp)),
        experts=FamilyGroups(
            Group(cut_experts, ep * tp),
            Group(dp * cp // ep // cut_experts * tp, ep * cut_experts * tp, tp),
        ),
    )
