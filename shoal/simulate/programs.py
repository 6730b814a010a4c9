"""The programs of played ranks, made from a Plan, its schedule's table and its costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shoal.cost import Costs, Layout
from shoal.cost.collectives import collective_seconds
from shoal.cost.time import parameters_on_rank
from shoal.plan import SettledPlan
from shoal.plan.groups import Group, Groups
from shoal.plan.schedules import Action, Schedule, Step, Times, Work, transfers
from shoal.simulate.engine import RankProgram
from shoal.simulate.passage import Collective
from shoal.simulate.stage_program import StageProgram
from shoal.timeline import Purpose
from shoal.workload import Parameters, Workload

__all__ = ["finish_of", "message_bytes", "norm_of", "rank_programs", "stage_programs", "undisturbed_times"]


def stage_programs(plan: SettledPlan, costs: Costs, count: int) -> list[StageProgram]:
    """Make the programs of all stages, for this many micro-batches."""
    placement = plan.placement if plan.pp > 1 else (0,)
    apart = plan.ranks // plan.pp
    return [
        StageProgram(plan, costs, stage, blocks, partial(Group.ranks, first=place * apart))
        for stage, (place, blocks) in enumerate(zip(placement, costs.blocks_of(plan, count), strict=True))
    ]


def undisturbed_times(stages: Sequence[StageProgram], transfer: float) -> Times:
    """Return the times of forwards and backwards without communication beside them."""

    def seconds(work: Work) -> tuple[float, ...]:
        return tuple(
            stage.passage(Action(work, number, 0), is_first=False, is_last=False).seconds
            for number, stage in enumerate(stages)
        )

    return Times(
        seconds(Work.FORWARD), seconds(Work.INPUT), seconds(Work.WEIGHT), (transfer,) * (len(stages) - 1)
    )


def rank_programs(
    plan: SettledPlan, costs: Costs, schedule: Schedule, stages: Sequence[StageProgram]
) -> list[RankProgram]:
    """Make the program of one rank at each place along the pipeline."""
    rows: Sequence[Sequence[Step]] = transfers(schedule, ahead=1) if plan.pp > 1 else schedule.table
    apart = plan.ranks // plan.pp
    return [
        RankProgram(
            rank=place * apart,
            steps=row,
            stages={number: stages[number] for number in schedule.stages_of(place)},
            last={
                action.stage: action
                for action in schedule.table[place]
                if action.work in (Work.BACKWARD, Work.WEIGHT)
            },
            finish=finish_of(plan, costs, schedule, place),
            norm=norm_of(plan, costs),
            update=_update(plan, costs, schedule, [stages[number] for number in schedule.stages_of(place)]),
        )
        for place, row in enumerate(rows)
    ]


def finish_of(plan: SettledPlan, costs: Costs, schedule: Schedule, place: int) -> list[Collective]:
    """Return the all-reduce of a tied embedding's gradients, if its two uses are on different ranks."""
    first, last = schedule.placement[0], schedule.placement[-1]
    if not costs.workload.tied or first == last or place not in (first, last):
        return []
    shards = Groups.of(plan).dense.shards.size
    held = parameters_on_rank(costs.workload.embedding.parameters, plan.tp, plan.ep)
    nbytes = 4 * held.total // shards
    apart = plan.ranks // plan.pp
    seconds = collective_seconds("all_reduce", nbytes, Group(2, apart * (last - first)), costs.cluster)
    ends = apart * first, apart * last
    return [Collective("all_reduce:embedding", seconds, nbytes, ends, Purpose.PIPELINE)]


def norm_of(plan: SettledPlan, costs: Costs) -> Collective | None:
    """Return the all-reduce of the squared gradient norm, if ranks hold different gradients."""
    groups = Groups.of(plan)
    if groups.parts.size == 1:
        return None
    seconds = collective_seconds("all_reduce", 8, groups.parts, costs.cluster)
    played = groups.pp if plan.pp > 1 else groups.parts
    return Collective("all_reduce:gradient norm", seconds, 8, played.ranks(0), Purpose.CONTROL)


def _update(plan: SettledPlan, costs: Costs, schedule: Schedule, stages: Sequence[StageProgram]) -> float:
    held = sum((stage.data_parallel.parameters for stage in stages), Parameters())
    return costs.after(plan, held, schedule.microbatches)


def message_bytes(plan: SettledPlan, workload: Workload) -> int:
    """Return the bytes of hidden state that one rank sends to the next stage."""
    layout = Layout.of(plan)
    tokens = layout.microbatch * workload.length // plan.cp // (1 if plan.tensor == "plain" else plan.tp)
    return tokens * workload.hidden * layout.width
