"""The axes of a Plan's mesh as one rank sees them, and the axes over which each kind of parameter is kept.

A family of parameters is sharded and summed over the same ranks. Most parameters are `dense`: tensor
parallelism cuts them, or is not used, and the ranks that hold the same part differ only in their data. The
gradients of parameters that tensor parallelism leaves whole are combined over the axis `tp` as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shoal.collectives import ProcessGroup
from shoal.parallel.communication import Axis, Connections, backend_of
from shoal.record import Recorder
from shoal.spec.plan import Group, Groups, Plan
from shoal.spec.timeline import Purpose

Members = tuple[int, ...]
"""Global ranks, in mesh order."""

Value = TypeVar("Value")


@dataclass(eq=False, slots=True)
class Reach:
    """How far gradients are summed in a step. With exchange=auto it changes between steps.

    Attributes:
        is_apart: Whether each worker makes its steps by itself.
    """

    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class _ByReach(Generic[Value]):
    """What depends on how far gradients are summed: its value if workers step together, and if apart."""

    together: Value
    apart: Value
    reach: Reach

    @property
    def now(self) -> Value:
        return self.apart if self.reach.is_apart else self.together


class _Sum(NamedTuple):
    """See `Family.summed` and `Family.factor`."""

    summed: Axis
    factor: float


class _Step(NamedTuple):
    """See `Axes.in_step` and `Axes.averaged`."""

    in_step: Axis
    averaged: Axis


@dataclass(frozen=True, slots=True)
class Family:
    """The ranks over which a kind of parameters is sharded and summed.

    Attributes:
        shard: The ranks that together hold one sharded state; used for gathers.
        reduce: A second group of the ranks of `shard`, for reductions. A reduction starts when its gradients
            are there; on a rank where a parameter has no gradient its order relative to gathers differs.
        replicate: The ranks that hold the same shard.
        sums: Those of them whose gradients are summed in a step, and the factor on the sum.
        copies: Number of ranks of `Axes.parts` that hold the same values.
        tied_ranks: The two ranks, of the first and the last pipeline stage, that also hold these parameters
            and whose gradients are added up; None if there are none.
        mesh: The ranks over which optimizers see the parameters as DTensors; None if each rank's part is an
            ordinary tensor. All families have an equal `mesh`, as optimizers work on lists of parameters.
    """

    shard: Axis
    reduce: Axis
    replicate: Axis
    sums: _ByReach[_Sum]
    copies: int
    tied_ranks: Axis | None = None
    mesh: Axis | None = None

    @property
    def summed(self) -> Axis:
        """The ranks that hold the same shard whose gradients are summed in a step."""
        return self.sums.now.summed

    @property
    def factor(self) -> float:
        """Factor on the sum of all ranks' gradients."""
        return self.sums.now.factor

    @property
    def is_mean(self) -> bool:
        """Whether gradients are averaged over exactly as many ranks as hold the same values.

        If so, a sum that was already reduced may be reduced again together with later gradients.
        """
        return math.isclose(self.summed.size * self.factor, 1.0) and self.tied_ranks is None

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that hold the same shard."""
        return self.replicate.index == 0 and (self.tied_ranks is None or self.tied_ranks.index == 0)


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a Plan.

    Attributes:
        world: All ranks.
        dp: The ranks with other samples.
        data: The ranks with other samples, or other parts of the samples: dp x cp.
        cp: The ranks with other parts of the same samples.
        tp: The ranks with other parts of the same layers.
        sequence: The ranks that split the sequences of the same samples between blocks: cp, and tp if it
            splits them too.
        ep: The ranks with other experts, neighbours in dp x cp.
        pp: The ranks with other stages of the same samples.
        parts: The ranks that together hold one whole state.
        workers: The ranks at the same place in other workers: those with other replicas of the model.
        steps: The ranks that make a step together, and those whose gradients are averaged in it.
        dense: Family of the parameters of which each rank of tp has its own part.
        partial: Family of the parameters that are whole on every rank of tp, where each rank has a part of
            their gradient's sum.
        whole: Family of the other parameters that are whole on every rank of tp. If each rank sees a part of
            the sequence it equals `partial`; otherwise all ranks have equal gradients.
        experts: Family of the parameters of experts.
        uncut: Family of parameters without dims, which cannot be sharded, if others are sharded; otherwise
            None.
        between_ends: `dense`, `partial` and `whole`, in this order, for parameters that the first and the
            last stage share on different ranks; empty if there are none.
    """

    world: Axis
    dp: Axis
    data: Axis
    cp: Axis
    tp: Axis
    sequence: Axis
    ep: Axis
    pp: Axis
    parts: Axis
    workers: Axis
    steps: _ByReach[_Step]
    dense: Family
    partial: Family
    whole: Family
    experts: Family
    uncut: Family | None = None
    between_ends: tuple[Family, ...] = ()

    @property
    def reach(self) -> Reach:
        """How far gradients are summed in a step."""
        return self.steps.reach

    @property
    def in_step(self) -> Axis:
        """The ranks that make a step together: all, or those of one worker."""
        return self.steps.now.in_step

    @property
    def averaged(self) -> Axis:
        """Those of `data` whose gradients are averaged in a step."""
        return self.steps.now.averaged

    @classmethod
    def build(cls, plan: Plan, recorder: Recorder, *, are_ends_tied: bool = False) -> Axes:
        """Make the process groups of a Plan's mesh from the default group; all its ranks must call this.

        All ranks make all groups in one order, also those that they are not in, as `torch.distributed` asks.
        Those of NCCL are used for the first time here, in this order, so that it connects them.

        Args:
            plan: A Plan for the number of ranks of the default group.
            recorder: Recorder of spans.
            are_ends_tied: Whether the first and the last stage share parameters, on different ranks.

        Raises:
            PlanError: The Plan is for another number of ranks than the default group has.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        plan.require_ranks(ranks)
        groups = Groups.of(plan)
        # With exchange=auto workers step together at first, and later perhaps apart.
        both = (groups, Groups.of(plan.replace(exchange="local")) if plan.exchanged.is_chosen else groups)
        reach = Reach()
        made: dict[Members, dist.ProcessGroup | None] = {}
        connections = Connections(rank, _device() if _uses_nccl() else None)
        connections.for_collectives(tuple(range(ranks)), None)

        def axis(
            name: str, pattern: Group, purpose: Purpose, *, own: bool = False, has_messages: bool = False
        ) -> Axis:
            found = among(name, pattern.tile(ranks), purpose, own=own)
            if has_messages:
                connections.for_all_pairs(found.members, found.group)
            return found

        def among(name: str, groups: Sequence[Members], purpose: Purpose, *, own: bool) -> Axis:
            for members in groups:
                if members not in made or own:
                    made[members] = _process_group(members, ranks, own=own)
                    if made[members] is not None:
                        connections.for_collectives(members, made[members])
            members = next(group for group in groups if rank in group)
            return Axis(name, members, rank, made[members], recorder, purpose)

        of_data = Purpose.DATA
        is_sharded, is_split = plan.sharding.cuts_optimizer, plan.tensor != "plain"
        reduce = axis("shard", groups.dense.shards, of_data, own=is_sharded)
        expert_reduce = reduce
        if plan.ep > 1:
            expert_reduce = axis("shard", groups.experts.shards, of_data, own=is_sharded)
        made.clear()
        shard = axis("shard", groups.dense.shards, of_data)
        data = axis("data", groups.data, of_data)
        averaged = [axis("data", each.averaged, of_data) for each in both]

        def sums(pattern: Callable[[Groups], Group], copies: float = 1.0) -> _ByReach[_Sum]:
            summed = [axis("replicate", pattern(each), of_data) for each in both]
            return _ByReach(
                _Sum(summed[0], 1.0 / averaged[0].size / copies),
                _Sum(summed[1], 1.0 / averaged[1].size / copies),
                reach,
            )

        # Gradients that are equal on all ranks of tp are averaged too, so that copies stay equal.
        equal = 1 if is_split else plan.tp
        # Unsharded experts are spread over several ranks of the data axis.
        spread = plan.ep if not is_sharded else 1
        replicate = axis("replicate", groups.whole.replicas, of_data)
        # Experts are sharded over other ranks than the rest, and one list of DTensors cannot express that.
        shared = shard if shard.size > 1 and plan.ep == 1 else None
        of_whole = sums(lambda each: each.whole.summed)
        partial = Family(shard, reduce, replicate, of_whole, plan.tp * spread, mesh=shared)
        among_dense = axis("replicate", groups.dense.replicas, of_data)
        of_dense = sums(lambda each: each.dense.summed)
        dense = Family(shard, reduce, among_dense, of_dense, spread, mesh=shared)
        whole = replace(partial, sums=sums(lambda each: each.whole.summed, equal))
        between_ends: list[Family] = []
        if are_ends_tied:
            tied = among("ends", _ends(groups, ranks), Purpose.PIPELINE, own=True)
            between_ends = [
                replace(family, tied_ranks=tied, copies=family.copies * 2)
                for family in (dense, partial, whole)
            ]
        uncut = None
        if shard.size > 1:
            single = axis("shard", Group(1), of_data)
            alike = axis("replicate", groups.stage, of_data)
            of_uncut = sums(lambda each: each.stage_in_step, equal)
            uncut = Family(single, single, alike, of_uncut, shard.size * plan.tp, mesh=shared)
        experts = Family(
            axis("shard", groups.experts.shards, of_data),
            expert_reduce,
            axis("replicate", groups.experts.replicas, of_data),
            # Each rank of ep has a mean over ep already (`expert_parallel`).
            sums(lambda each: each.experts.summed, equal / plan.ep),
            plan.tp,
        )
        pp = axis("pp", groups.pp, Purpose.PIPELINE, own=True)
        if plan.pp > 1 and _uses_nccl():
            pp.channels.update(_channels(plan.placement, groups.pp.tile(ranks), rank, connections))
        together, apart = (
            _Step(axis("in step", each.in_step, Purpose.CONTROL), mean)
            for each, mean in zip(both, averaged, strict=True)
        )
        return cls(
            world=axis("world", groups.world, Purpose.CONTROL),
            dp=axis("dp", groups.dp, of_data),
            data=data,
            cp=axis("cp", groups.cp, Purpose.CONTEXT, own=True, has_messages=True),
            tp=axis("tp", groups.tp, Purpose.TENSOR, has_messages=plan.tensor == "async"),
            # Only experts communicate over this axis: their tokens are counted over whole sequences.
            sequence=axis("sequence", groups.sequence, Purpose.EXPERT),
            # Its own group: reductions and all-to-alls of experts may start in different orders on ranks.
            ep=axis("ep", groups.ep, Purpose.EXPERT, own=plan.ep > 1, has_messages=plan.ep > 1),
            pp=pp,
            parts=axis("parts", groups.parts, Purpose.CONTROL),
            workers=axis("workers", groups.workers, of_data, own=True),
            steps=_ByReach(together, apart, reach),
            dense=dense,
            partial=partial,
            whole=whole,
            experts=experts,
            uncut=uncut,
            between_ends=tuple(between_ends),
        )


def _ends(groups: Groups, ranks: int) -> list[Members]:
    """Return the first and the last stage's rank of each pipeline, and every other rank by itself."""
    pipelines = groups.pp.tile(ranks)
    return [(line[0], line[-1]) for line in pipelines] + [
        (rank,) for line in pipelines for rank in line[1:-1]
    ]


def _channels(
    placement: Sequence[int], pipelines: Sequence[Members], rank: int, connections: Connections
) -> dict[int, dist.ProcessGroup]:
    """Make a group for each two ranks of a pipeline with neighbouring stages.

    Returns:
        The groups that this rank is in, by the other rank's index in its pipeline.
    """
    pairs = sorted({(min(pair), max(pair)) for pair in itertools.pairwise(placement) if pair[0] != pair[1]})
    channels = {}
    for line in pipelines:
        for one, other in pairs:
            group = _new_group((line[one], line[other]))
            connections.for_messages((line[one], line[other]), group)
            if rank in (line[one], line[other]):
                channels[other if rank == line[one] else one] = group
    return channels


def _process_group(members: Members, ranks: int, *, own: bool) -> dist.ProcessGroup | None:
    """Return the group of these ranks; None, the default group, also if there is only one process."""
    if len(members) == 1 or (len(members) == ranks and not own):
        return None
    return _new_group(members)


def _new_group(members: Members) -> dist.ProcessGroup:
    # For NCCL alone: the default group may have another backend for the CPU, which is for Python objects.
    nccl: dict[str, Any] = {}
    if _uses_nccl():
        nccl = {"backend": "nccl", "device_id": _device()}
    group: dist.ProcessGroup = dist.new_group(list(members), timeout=_default_timeout(), **nccl)
    return group


def _device() -> torch.device:
    """Return the device of this rank's groups of NCCL."""
    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    return bound or torch.device("cuda", torch.cuda.current_device())


def _uses_nccl() -> bool:
    return dist.is_initialized() and backend_of(None, "cuda") == "nccl"


def _default_timeout() -> timedelta | None:
    """Return the time-out of the default group, which torch does not pass on to new groups."""
    world = dist.group.WORLD
    assert world is not None
    if isinstance(world, ProcessGroup):
        return world.timeout
    options = world._get_backend(world._device_types[0]).options
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
