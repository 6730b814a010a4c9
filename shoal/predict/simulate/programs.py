"""The programs of played ranks, made from a Plan, its schedule's table and its costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial

from shoal.predict.cost import Costs, Layout
from shoal.predict.cost.collectives import collective_seconds, message_bytes
from shoal.predict.cost.time import parameters_on_rank
from shoal.predict.simulate.engine import Link, RankProgram
from shoal.predict.simulate.stage_pass import Collective, Members
from shoal.predict.simulate.stage_program import StageProgram
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.plan.groups import Groups
from shoal.spec.plan.schedules import FOUND, CommonOrder, Schedule, Times, Work, common_order_of, made_order
from shoal.spec.timeline import Purpose
from shoal.spec.workload import Parameters


def stage_programs(
    plan: SettledPlan, costs: Costs, count: int, rank: int | None = None, *, exchanges: bool = True
) -> list[StageProgram]:
    """Make the programs of all stages; stages with equal blocks, groups and costs share theirs.

    Args:
        plan: The Plan.
        costs: Costs of the Plan's workload on its cluster.
        count: Micro-batches of a step.
        rank: The rank at the first place; None for a play that notes nothing, where groups need no ranks.
        exchanges: Whether gradients and weights are communicated.
    """
    placement = plan.placement if plan.pp > 1 else (0,)
    members: list[Members] = [_nobody] * plan.pp
    if rank is not None:
        members = [cache(partial(Group.around, rank=each)) for each in Groups.of(plan).pp.ranks(rank)]
    made = cache(partial(StageProgram, plan, is_named=rank is not None, exchanges=exchanges))
    found, turns = [], [0] * plan.pp
    for place, blocks in zip(placement, costs.blocks_of(plan, count), strict=True):
        found.append(made(costs.at(plan, place), turns[place], tuple(blocks), members[place]))
        turns[place] += 1
    return found


def order_of(plan: SettledPlan, costs: Costs, stages: Sequence[StageProgram], count: int) -> CommonOrder:
    """Return the order of a step's actions and messages; the arguments are those of `stage_programs`."""
    if plan.pp == 1:
        return made_order("1f1b", 1, 1, count)
    if plan.schedule != FOUND:
        return made_order(plan.schedule, plan.pp, plan.stages // plan.pp, count)
    return common_order_of(plan.schedule_for(count, undisturbed_times(stages, costs.sends(plan))))


def undisturbed_times(stages: Sequence[StageProgram], transfers: Iterable[float]) -> Times:
    """Return the times of forwards and backwards without communication beside them.

    Args:
        stages: The stages.
        transfers: Seconds of a message from each stage to the next.
    """

    def seconds(work: Work) -> tuple[float, ...]:
        return tuple(stage.passage(work).seconds for stage in stages)

    return Times(seconds(Work.FORWARD), seconds(Work.INPUT), seconds(Work.WEIGHT), tuple(transfers))


def _nobody(group: Group) -> tuple[int, ...]:
    """Return no ranks, where nothing is noted."""
    return ()


def rank_programs(
    plan: SettledPlan,
    costs: Costs,
    schedule: Schedule,
    stages: Sequence[StageProgram],
    rank: int | None = None,
) -> list[RankProgram]:
    """Make the program of one rank at each place along the pipeline.

    Args:
        plan: The Plan.
        costs: Costs of the Plan's workload on its cluster.
        schedule: The schedule's table.
        stages: The programs of all stages.
        rank: The rank at the first place; None for a play that notes nothing.
    """
    first = Groups.of(plan).pp.ranks(rank or 0)
    norm = norm_of(plan, costs, rank)
    held = [
        _held([stages[number] for number in schedule.stages_of(place)]) for place in range(schedule.ranks)
    ]
    count = schedule.microbatches
    return [
        RankProgram(
            rank=first[place],
            stages={number: stages[number] for number in schedule.stages_of(place)},
            finish=finish_of(plan, costs, schedule, place),
            norm=norm,
            merge=_merge(plan, costs.at(plan, place), held[place], count, is_named=rank is not None),
            update=costs.after_at(plan, place, held[place], count),
            contention=costs.at(plan, place).cluster.device.contention,
            files=costs.file_waits(plan, place, count),
        )
        for place in range(schedule.ranks)
    ]


def links_of(
    plan: SettledPlan, costs: Costs, pairs: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], Link]:
    """Return the link of each pair of a sender and a receiver along the pipeline."""
    nbytes = round(message_bytes(Layout.of(plan), costs.workload))
    return {pair: Link(costs.send(plan, *pair), nbytes) for pair in pairs}


def finish_of(plan: SettledPlan, costs: Costs, schedule: Schedule, place: int) -> list[Collective]:
    """Return the all-reduce of a tied embedding's gradients, if its two uses are on different ranks."""
    first, last = schedule.placement[0], schedule.placement[-1]
    if not costs.workload.tied or first == last or place not in (first, last):
        return []
    shards = Groups.of(plan).dense.shards.size
    held = parameters_on_rank(costs.workload.embedding.parameters, plan.tp, plan.ep)
    nbytes = 4 * held.total // shards
    ranks = Groups.of(plan).pp.ranks(0)
    ends = ranks[first], ranks[last]
    seconds = collective_seconds("all_reduce", nbytes, Group(2, ends[1] - ends[0]), costs.cluster)
    return [Collective("all_reduce:embedding", seconds, nbytes, ends, Purpose.PIPELINE)]


def norm_of(plan: SettledPlan, costs: Costs, rank: int | None) -> Collective | None:
    """Return the all-reduce of the squared gradient norm, if ranks hold different gradients.

    Args:
        plan: The Plan.
        costs: Costs of the Plan's workload on its cluster.
        rank: One of the ranks; None for a play that notes nothing.
    """
    groups = Groups.of(plan)
    if groups.parts.size == 1:
        return None
    seconds = collective_seconds("all_reduce", 8, groups.parts, costs.cluster)
    played = groups.pp if plan.pp > 1 else groups.parts
    ranks = () if rank is None else played.around(rank)
    return Collective("all_reduce:gradient norm", seconds, 8, ranks, Purpose.CONTROL)


def _held(stages: Sequence[StageProgram]) -> Parameters:
    return sum((stage.data_parallel.parameters for stage in stages), Parameters())


def _merge(
    plan: SettledPlan, costs: Costs, held: Parameters, count: int, *, is_named: bool
) -> Collective | None:
    """Return a step's share of the merges of a rank that holds these parameters."""
    merge = costs.merge(plan, held, count)
    if merge.seconds == 0:
        return None
    ranks = Groups.of(plan).workers.ranks(0) if is_named else ()
    name = "push and pull:values" if plan.exchange == "server" else f"merge:1 in {plan.every} steps"
    return Collective(name, merge.seconds, round(merge.nbytes), ranks, Purpose.DATA)
