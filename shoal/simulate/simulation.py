"""`simulate`: a Plan's steps played against the clock, and what they come to.

The table of the schedule, the costs of the stages' blocks and the links between them make a program for each
rank along the pipeline; the engine plays these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from shoal.cluster import Cluster
from shoal.cost.layout import Layout
from shoal.cost.network import Group, collective_seconds
from shoal.cost.step import Costs
from shoal.errors import ClusterError
from shoal.plan import Plan
from shoal.plan.schedules import Action, Played, Schedule, Step, Times, Work, make, transfers
from shoal.simulate.bubble import bubble_spans
from shoal.simulate.engine import Link, RankProgram, play_steps
from shoal.simulate.exchange import parameters_of
from shoal.simulate.journal import Journal
from shoal.simulate.passage import Collective
from shoal.simulate.stage_program import StageProgram
from shoal.timeline import Breakdown, Kind, Lane, Span, Timeline, explain
from shoal.workload import Parameters, Workload

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What some steps of a Plan will do.

    Attributes:
        workload: What is trained.
        cluster: Where.
        plan: How, its micro-batch settled.
        batch: Samples of a step.
        steps: How many were played.
        seconds: Of a step.
        played: The first step's forwards and backwards, to draw; its times are those of an undisturbed
            forward and backward of each stage.
    """

    workload: Workload
    cluster: Cluster
    plan: Plan
    batch: int
    steps: int
    seconds: float
    played: Played
    _actions: Sequence[Sequence[Sequence[tuple[float, float]]]]
    _journal: Journal

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.batch * self.workload.length / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        """Of one device."""
        return self.tokens_per_second / self.plan.ranks

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the model's FLOP are.

        These are three times those of forward's products and attention, with the whole square of positions
        even where attention is causal; nothing that is recomputed counts.
        """
        peak = self.cluster.device.peak[self.plan.precision] * self.plan.ranks
        return self.batch * self.workload.training_flop / self.seconds / peak

    @cached_property
    def timeline(self) -> Timeline:
        """As a run of these steps would be recorded, of one rank along the pipeline for all like it.

        The ranks have the numbers that they have in the mesh.
        """
        return Timeline([*self._journal.spans(), *self._bubbles()])

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where the time goes."""
        return explain(self.timeline)

    def _bubbles(self) -> list[Span]:
        if self.plan.pp == 1:
            return []
        schedule = self.played.schedule
        apart = self.plan.ranks // self.plan.pp
        return [
            bubble
            for step in self._actions
            for bubble in bubble_spans(
                schedule,
                {
                    place * apart: [
                        (action, Span(place * apart, Lane.COMPUTE, Kind.FORWARD, "", start, stop - start))
                        for action, (start, stop) in zip(schedule.table[place], row, strict=True)
                    ]
                    for place, row in enumerate(step)
                },
            )
        ]


def simulate(workload: Workload, cluster: Cluster, plan: Plan, batch: int, *, steps: int = 1) -> Simulation:
    """Plays steps of a Plan.

    Args:
        workload: What is trained.
        cluster: Where; as many devices as the Plan has ranks.
        plan: How.
        batch: Samples of a step.
        steps: How many, one after another.

    Raises:
        PlanError: The Plan does not fit the devices, the batch or the number of layers.
        ClusterError: What the device computes in the Plan's precision is not known.
    """
    plan.require_ranks(cluster.devices)
    plan = plan.with_microbatch_for(batch)
    assert plan.microbatch is not None
    if plan.precision not in cluster.device.peak:
        raise ClusterError(
            f"the peak of {cluster.device.name} in {plan.precision} is not known",
            possible=f"precision={', '.join(cluster.device.peak)}",
            change="choose another precision, or describe the device's peak",
        )
    costs = Costs(workload, cluster)
    count = batch // plan.dp // plan.microbatch
    stages = _stages(plan, costs, count)
    times = _times(stages, costs.send(plan))
    schedule = plan.schedule_for(count, times) if plan.pp > 1 else make("1f1b", 1, 1, count)
    programs = _programs(plan, costs, schedule, stages)
    link = Link(costs.send(plan), _message_bytes(plan, workload))
    journal, actions, end = play_steps(programs, schedule.placement, link, cluster.device.contention, steps)
    played = Played(
        schedule,
        times,
        tuple(tuple(start for start, _ in row) for row in actions[0]),
        tuple(tuple(stop for _, stop in row) for row in actions[0]),
    )
    return Simulation(
        workload=workload,
        cluster=cluster,
        plan=plan,
        batch=batch,
        steps=steps,
        seconds=end / steps,
        played=played,
        _actions=actions,
        _journal=journal,
    )


def _stages(plan: Plan, costs: Costs, count: int) -> list[StageProgram]:
    placement = plan.placement if plan.pp > 1 else (0,)
    apart = plan.ranks // plan.pp
    return [
        StageProgram(plan, costs, stage, blocks, partial(_members, place * apart))
        for stage, (place, blocks) in enumerate(zip(placement, costs.blocks_of(plan, count), strict=True))
    ]


def _members(first: int, group: Group) -> tuple[int, ...]:
    """The global ranks of a group, given its first."""
    return tuple(range(first, first + group.size * group.stride, group.stride))


def _times(stages: Sequence[StageProgram], transfer: float) -> Times:
    """Of forwards and backwards that nothing disturbs."""

    def seconds(work: Work) -> tuple[float, ...]:
        return tuple(
            stage.passage(Action(work, number, 0), is_first=False, is_last=False).seconds
            for number, stage in enumerate(stages)
        )

    return Times(
        seconds(Work.FORWARD), seconds(Work.INPUT), seconds(Work.WEIGHT), (transfer,) * (len(stages) - 1)
    )


def _programs(
    plan: Plan, costs: Costs, schedule: Schedule, stages: Sequence[StageProgram]
) -> list[RankProgram]:
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
            finish=_finish(plan, costs, schedule, place),
            norm=_norm(plan, costs),
            update=_update(plan, costs, [stages[number] for number in schedule.stages_of(place)]),
        )
        for place, row in enumerate(rows)
    ]


def _finish(plan: Plan, costs: Costs, schedule: Schedule, place: int) -> list[Collective]:
    """The sum of a tied embedding's gradients, where its two uses are on different ranks."""
    first, last = schedule.placement[0], schedule.placement[-1]
    if not costs.workload.tied or first == last or place not in (first, last):
        return []
    shards = plan.shards * plan.cp if plan.shard != "none" else 1
    nbytes = 4 * parameters_of(costs.workload.embedding, plan) // shards
    apart = plan.ranks // plan.pp
    seconds = collective_seconds("all_reduce", nbytes, Group(2, apart * (last - first)), costs.cluster)
    return [Collective("all_reduce:embedding", seconds, nbytes, (apart * first, apart * last))]


def _norm(plan: Plan, costs: Costs) -> Collective | None:
    """The sum of the squares of all gradients, where ranks hold different ones."""
    size = plan.ranks // plan.replicas
    if size == 1:
        return None
    seconds = collective_seconds("all_reduce", 8, Group(size), costs.cluster)
    group = range(0, plan.ranks, plan.ranks // plan.pp) if plan.pp > 1 else range(size)
    return Collective("all_reduce:gradient norm", seconds, 8, tuple(group))


def _update(plan: Plan, costs: Costs, stages: Sequence[StageProgram]) -> float:
    held = sum(bucket.parameters for stage in stages for bucket in stage.exchange.buckets)
    return costs.update(plan, Parameters(whole=round(held)))


def _message_bytes(plan: Plan, workload: Workload) -> int:
    layout = Layout.of(plan)
    tokens = layout.microbatch * workload.length // plan.cp // (1 if plan.tensor == "plain" else plan.tp)
    return tokens * workload.hidden * layout.width
