"""The axes of a Plan's mesh as one rank sees them, and which of them each kind of parameter is kept over.

A family of parameters is what is sharded and summed over the same ranks. Most parameters are `dense`: tensor
parallelism cuts them, or there is none, and the ranks that hold the same part differ in their data alone. The
gradients of what it leaves whole are combined over the axis `tp` as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.collectives import ProcessGroup
from shoal.parallel.communication import Axis
from shoal.plan import AXES, Mesh, Plan
from shoal.record import Recorder

__all__ = ["Axes", "Family"]

Group = tuple[int, ...]
"""Global ranks, in mesh order."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a kind of parameters is sharded and summed over.

    Attributes:
        shard: The ranks that together hold one sharded state; for gathers.
        reduce: The same ranks, in a group of their own for reductions. These start when gradients are there,
            and so keep no order with gathers on a rank where a parameter had none.
        replicate: The ranks that hold the same shard.
        factor: What a sum of all their gradients is multiplied by.
        copies: How many ranks of `Axes.parts` hold the same.
        tied_ranks: The two ranks, of the first and the last pipeline stage, that hold the same besides and
            whose gradients are to be added up; None if there are none.
        mesh: The ranks over which optimizers see the parameters as DTensors; None if each rank's part is an
            ordinary tensor. It is the same of all families, as optimizers work on lists of parameters.
    """

    shard: Axis
    reduce: Axis
    replicate: Axis
    factor: float
    copies: int
    tied_ranks: Axis | None = None
    mesh: Axis | None = None

    @property
    def is_mean(self) -> bool:
        """Whether the ranks that hold the same are as many as gradients are averaged over.

        Then a sum that was reduced before may be reduced again with what was added to it.
        """
        return math.isclose(self.replicate.size * self.factor, 1.0) and self.tied_ranks is None

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that hold the same shard."""
        return self.replicate.index == 0 and (self.tied_ranks is None or self.tied_ranks.index == 0)


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a Plan.

    Attributes:
        world: All ranks.
        dp: Those with other samples.
        data: Those with other samples, or other parts of them: dp x cp.
        cp: Those with other parts of the same samples.
        tp: Those with other parts of the same layers.
        sequence: Those that split the sequences of the same samples between blocks: cp, and tp where it does.
        ep: Those with other experts, neighbours in dp x cp.
        pp: Those with other stages of the same samples.
        parts: Those that together hold one whole state.
        dense: What parameters of which each rank of tp has its own part are kept over.
        partial: What parameters are kept over that are whole on every rank of tp, each of which has a part of
            their gradient's sum.
        whole: What other parameters are kept over that are whole on every rank of tp. Where each sees a part
            of the sequence it is the same as `partial`; else all have the same gradient.
        experts: What the parameters of experts are kept over.
        uncut: What parameters without dims are kept over where others are sharded: these cannot be; else
        None. between_ends: `dense`, `partial` and `whole`, in this order, of parameters that the first and
        the last
            stage share and that are on different ranks; empty if there are none.
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
    dense: Family
    partial: Family
    whole: Family
    experts: Family
    uncut: Family | None = None
    between_ends: tuple[Family, ...] = ()

    @classmethod
    def build(cls, plan: Plan, recorder: Recorder, *, are_ends_tied: bool = False) -> Axes:
        """Makes the process groups of a Plan's mesh out of the default group, which all ranks must call.

        Args:
            plan: For as many ranks as there are.
            recorder: Where spans go.
            are_ends_tied: Whether the first and the last stage share parameters, on different ranks.

        Raises:
            PlanError: The Plan is for another number of ranks than the default group has.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        plan.require_ranks(ranks)
        mesh = Mesh.of(plan)
        made: dict[Group, dist.ProcessGroup | None] = {}

        def axis(name: str, groups: Sequence[Group], *, own: bool = False) -> Axis:
            for members in groups:
                if members not in made or own:
                    made[members] = _process_group(members, ranks, own=own)
            members = next(group for group in groups if rank in group)
            return Axis(name, members, rank, made[members], recorder)

        is_sharded, is_split = plan.shard != "none", plan.tensor != "plain"
        cut, copied = (("shard", "cp"), ("replicate",)) if is_sharded else ((), ("replicate", "cp"))
        apart, expert_shards, expert_copies = _expert_groups(mesh, plan.ep, is_sharded=is_sharded)
        reduce = axis("shard", mesh.groups(*cut), own=is_sharded)
        expert_reduce = axis("shard", expert_shards, own=is_sharded) if plan.ep > 1 else reduce
        made.clear()
        shard = axis("shard", mesh.groups(*cut))
        data = axis("data", mesh.groups("dp", "cp"))
        factor = 1.0 / data.size
        # What has equal gradients on all ranks of tp is averaged all the same: copies never drift apart.
        average = factor if is_split else factor / plan.tp
        # Unsharded experts are not all in one rank of the data axis.
        spread = plan.ep if not is_sharded else 1
        replicate = axis("replicate", mesh.groups(*copied, "tp"))
        # Experts are shared by other ranks than the rest, which one list of DTensors cannot say.
        shared = shard if shard.size > 1 and plan.ep == 1 else None
        partial = Family(shard, reduce, replicate, factor, plan.tp * spread, mesh=shared)
        dense = Family(shard, reduce, axis("replicate", mesh.groups(*copied)), factor, spread, mesh=shared)
        whole = replace(partial, factor=average)
        between_ends: list[Family] = []
        if are_ends_tied:
            tied = axis("ends", _ends(mesh), own=True)
            between_ends = [
                replace(family, tied_ranks=tied, copies=family.copies * 2)
                for family in (dense, partial, whole)
            ]
        uncut = None
        if shard.size > 1:
            alone = axis("shard", [(member,) for member in range(ranks)])
            alike = axis("replicate", mesh.groups("dp", "cp", "tp"))
            uncut = Family(alone, alone, alike, average, shard.size * plan.tp, mesh=shared)
        experts = Family(
            axis("shard", expert_shards), expert_reduce, axis("replicate", expert_copies), average, plan.tp
        )
        parts = axis("parts", mesh.groups(*cut, "pp", "tp") if spread == 1 else _joined(apart, mesh))
        return cls(
            world=axis("world", mesh.groups(*AXES)),
            dp=axis("dp", mesh.groups("dp")),
            data=data,
            cp=axis("cp", mesh.groups("cp"), own=True),
            tp=axis("tp", mesh.groups("tp")),
            sequence=axis("sequence", mesh.groups("cp", *(("tp",) if is_split else ()))),
            # Reductions may start in another order there than what their experts exchange.
            ep=axis("ep", apart, own=plan.ep > 1),
            pp=axis("pp", mesh.groups("pp"), own=True),
            parts=parts,
            dense=dense,
            partial=partial,
            whole=whole,
            experts=experts,
            uncut=uncut,
            between_ends=tuple(between_ends),
        )


def _ends(mesh: Mesh) -> list[Group]:
    """The first and the last stage's rank of each pipeline, and every other rank by itself."""
    pipelines = mesh.groups("pp")
    return [(ranks[0], ranks[-1]) for ranks in pipelines] + [
        (rank,) for ranks in pipelines for rank in ranks[1:-1]
    ]


def _expert_groups(
    mesh: Mesh, size: int, *, is_sharded: bool
) -> tuple[list[Group], list[Group], list[Group]]:
    """The ranks with different experts; those that shard the same experts; those that hold the same shard."""
    _, _, cut, parts, tp = mesh.sizes
    count = max(1, cut * parts // size) if is_sharded else 1  # ranks that shard the same experts
    different, shards, copies = [], [], []
    for everyone in mesh.groups("dp", "cp", "tp"):
        lines = [everyone[place::tp] for place in range(tp)]
        different += [line[i : i + size] for line in lines for i in range(0, len(line), size)]
        for expert in range(size):
            alike = [line[expert::size] for line in lines]
            shards += [line[i : i + count] for line in alike for i in range(0, len(line), count)]
            for place in range(count):
                copies.append(tuple(sorted(rank for line in alike for rank in line[place::count])))
    return different, shards, copies


def _joined(groups: Sequence[Group], mesh: Mesh) -> list[Group]:
    """Each of the groups with the ranks that differ from its own along pp and tp."""
    joined = {
        tuple(sorted(other for rank in group for other in mesh.group(rank, "pp", "tp"))) for group in groups
    }
    return sorted(joined)


def _process_group(members: tuple[int, ...], ranks: int, *, own: bool) -> dist.ProcessGroup | None:
    """The group of these ranks; None, which is the default group, also where there is nobody else."""
    if len(members) == 1 or (len(members) == ranks and not own):
        return None
    group: dist.ProcessGroup = dist.new_group(list(members), timeout=_default_timeout())
    return group


def _default_timeout() -> timedelta | None:
    """The time-out that the default group was made with, which torch does not pass on to new groups."""
    world = dist.group.WORLD
    assert world is not None
    if isinstance(world, ProcessGroup):
        return world.timeout
    options = world._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")).options
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
