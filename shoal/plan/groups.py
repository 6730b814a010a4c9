"""The groups of ranks that communicate under a Plan, for each axis and each family of parameters.

All groups of an axis are one pattern with different first ranks, because ranks stand row by row on the axes,
in the Plan's `order` (`shoal.plan.mesh`). `shoal.parallel.axes` makes process groups of them; the
cost model looks up which links such a pattern uses.

There are three families of parameters. They differ in the ranks that hold equal values and see other data:

    dense      those that tp divides, and all others where tp=1: the ranks of dp x cp
    whole      those that every rank of tp has, with tp > 1: dp x cp x tp
    experts    with ep > 1: every ep-th rank of dp x cp in the mesh's order, times tp

A sharded state is cut over dp / replicate x cp ranks, and an expert's over ep times fewer; the other ranks of
its family hold replicas. The ranks of one replica are a worker. If workers make steps by themselves
(`exchange=local`), gradients are summed within a worker only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shoal.plan.group import Dim, Group, split_dims
from shoal.plan.order import AXES, axes_of, strides_of
from shoal.plan.plan import Plan

__all__ = ["FamilyGroups", "Group", "Groups", "context_group", "expert_group", "tensor_group"]


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
        workers: Ranks at the same place in other workers.
        in_step: Ranks that make a step together: all, or those of one worker.
        averaged: Those ranks of `data` whose gradients are averaged in a step.
        stage_in_step: Those ranks of `stage` that make a step together.
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
    workers: Group
    in_step: Group
    averaged: Group
    stage_in_step: Group
    dense: FamilyGroups
    whole: FamilyGroups
    experts: FamilyGroups

    @classmethod
    def of(cls, plan: Plan) -> Groups:
        """Return the groups of a Plan."""
        sizes = (plan.pp, plan.replicas, plan.shards, plan.cp, plan.tp)
        return _groups(
            sizes,
            plan.ep,
            plan.sharding.cuts_optimizer,
            plan.tensor != "plain",
            plan.order,
            are_apart=plan.exchange in ("local", "server"),
        )


@lru_cache(maxsize=1 << 12)
def _groups(
    sizes: tuple[int, ...], ep: int, is_cut: bool, is_split: bool, order: str, *, are_apart: bool
) -> Groups:
    """Return the groups of a mesh. `sizes` are those of `AXES`."""
    numbers = dict(zip(AXES, sizes, strict=True))
    strides = strides_of(order, numbers)

    def dims(*axes: str) -> list[Dim]:
        return [(numbers[axis], strides[axis]) for axis in axes_of(order) if axis in axes]

    def along(*axes: str) -> Group:
        return Group.along(dims(*axes))

    cut = ("shard", "cp") if is_cut else ()
    copied = ("replicate",) if is_cut else ("replicate", "cp")
    parted = split_dims(dims(*(cut or copied)), ep)
    assert parted is not None, "Plan checks ep"
    others, neighbours = parted
    together = () if are_apart else ("replicate",)
    summed = tuple(axis for axis in copied if axis != "replicate") + together
    # If a state is not sharded, its experts are on several ranks.
    held = dims(*cut) if is_cut else neighbours
    return Groups(
        world=along(*AXES),
        dp=along("replicate", "shard"),
        data=along("replicate", "shard", "cp"),
        cp=along("cp"),
        tp=along("tp"),
        sequence=along("cp", "tp") if is_split else along("cp"),
        ep=Group.along(neighbours),
        pp=along("pp"),
        stage=along("replicate", "shard", "cp", "tp"),
        parts=_nested(held, dims("pp", "tp")),
        workers=along("replicate"),
        in_step=along("pp", *together, "shard", "cp", "tp"),
        averaged=along(*together, "shard", "cp"),
        stage_in_step=along(*together, "shard", "cp", "tp"),
        dense=FamilyGroups(along(*cut), along(*copied), along(*summed)),
        whole=FamilyGroups(along(*cut), along(*copied, "tp"), along(*summed, "tp")),
        experts=FamilyGroups(
            Group.along(others) if is_cut else Group(1),
            _nested(dims("replicate") if is_cut else others, dims("tp")),
            _nested(dims(*together) if is_cut else others, dims("tp")),
        ),
    )


def _nested(*dims: list[Dim]) -> Group:
    """Return the pattern along all these dims, given in any order."""
    return Group.along(sorted(itertools.chain(*dims), key=lambda each: each[1], reverse=True))
