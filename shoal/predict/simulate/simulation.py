"""`simulate`: play a Plan's steps and sum up their times.

The schedule's table, the costs of the stages' blocks and the links between stages make a program for each
rank along the pipeline. The engine plays these programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.predict.cost import Alike, Costs, settle_split
from shoal.predict.cost.time import crowded_seconds, straggler_share
from shoal.predict.simulate.bubble import bubble_spans
from shoal.predict.simulate.engine import Link, Play, RankProgram, play_steps
from shoal.predict.simulate.journal import Account, Journal, account_of
from shoal.predict.simulate.programs import (
    links_of,
    order_of,
    rank_programs,
    stage_programs,
    undisturbed_times,
)
from shoal.spec.cluster import Cluster, peak_of_all
from shoal.spec.plan import Groups, Plan, SettledPlan
from shoal.spec.plan.schedules import CommonOrder, Played, Times
from shoal.spec.plan.schedules.draw import Panel, draw_panels
from shoal.spec.timeline import Breakdown, Span, Timeline
from shoal.spec.workload import Workload
from shoal.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The predicted steps of a Plan.

    Attributes:
        workload: The training that is simulated.
        cluster: The machines that it runs on.
        plan: The Plan that it runs under, with a fixed micro-batch.
        batch: Samples of a step.
        steps: Number of steps that were played.
        seconds: Seconds of a step.
        played: The first step's forwards and backwards, for drawing; its times are those of a forward and
            backward of each stage without communication beside them.
    """

    workload: Workload
    cluster: Cluster
    plan: SettledPlan
    batch: int
    steps: int
    seconds: float
    played: Played
    _actions: Sequence[Sequence[Sequence[tuple[float, float]]]]
    _journal: Journal
    _numbers: Mapping[int, int]  # ranks along dp that a played rank stands for, if they are not all alike
    _pace: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all devices together."""
        return self.batch * self.workload.length / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        """Return the tokens per second of one device."""
        return self.tokens_per_second / self.plan.ranks

    @property
    def mfu(self) -> float:
        """Return the model's FLOP rate as a share of the devices' peak.

        The model's FLOP are three times those of forward's products and attention. Attention counts the whole
        square of positions even where it is causal. Recompute does not count.
        """
        peak = peak_of_all(self.cluster, self.plan.precision)
        return self.batch * self.workload.training_flop / self.seconds / peak

    @cached_property
    def timeline(self) -> Timeline:
        """Return the Timeline that a run of these steps would record.

        It has one rank for each place along the pipeline; with shares, the first of each group of ranks that
        are alike. Ranks have the numbers that they have in the mesh.
        """
        spans = [*self._journal.spans(), *self._bubbles]
        return Timeline(spans if self._pace == 1 else [_at_pace(span, self._pace) for span in spans])

    @property
    def breakdown(self) -> Breakdown:
        """Return where the time goes."""
        return self._account.breakdown

    def exposed(self, rank: int) -> Mapping[str, float]:
        """Return, by purpose, the seconds of a step in which a rank's communication is exposed.

        Args:
            rank: A global rank that was played.
        """
        return self._account.exposed[rank]

    @cached_property
    def _account(self) -> Account:
        return account_of(self._journal, self._bubbles, self._pace, self._numbers)

    @cached_property
    def _bubbles(self) -> list[Span]:
        if self.plan.pp == 1:
            return []
        schedule = self.played.schedule
        first = Groups.of(self.plan).pp.ranks(0)
        return [
            bubble
            for step in self._actions
            for bubble in bubble_spans(
                schedule,
                {
                    first[place]: [
                        (action, start, stop)
                        for action, (start, stop) in zip(schedule.table[place], row, strict=True)
                    ]
                    for place, row in enumerate(step)
                },
            )
        ]


def simulate(workload: Workload, cluster: Cluster, plan: Plan, batch: int, *, steps: int = 1) -> Simulation:
    """Play steps of a Plan.

    Args:
        workload: The training to simulate.
        cluster: The machines that it runs on, with as many devices as the Plan has ranks.
        plan: The Plan that it runs under.
        batch: Samples of a step.
        steps: Number of steps, played one after another.

    Raises:
        PlanError: The Plan does not fit the devices, the batch or the number of layers.
        ClusterError: The device's peak in the Plan's precision is not known.
    """
    plan.require_ranks(cluster.devices)
    plan = settle_split(SettledPlan.of(plan, batch), workload, cluster, batch)
    peak_of_all(cluster, plan.precision)  # raises
    costs, late, journal = Costs(workload, cluster), straggler_share(plan, cluster), Journal()
    alike = [_Course.of(each) for each in costs.alike(plan, batch)]
    ends = [each.play(late).end for each in alike] if len(alike) > 1 else [0.0]
    plays = [
        each.play(each.lateness(late, end, max(ends)), steps, journal)
        for each, end in zip(alike, ends, strict=True)
    ]
    slowest = ends.index(max(ends))
    play, course = plays[slowest], alike[slowest]
    played = Played(
        course.order.schedule,
        course.times,
        tuple(tuple(start for start, _ in row) for row in play.actions[0]),
        tuple(tuple(stop for _, stop in row) for row in play.actions[0]),
    )
    simulation = Simulation(
        workload=workload,
        cluster=cluster,
        plan=plan,
        batch=batch,
        steps=steps,
        seconds=play.end / steps,
        played=played,
        _actions=play.actions,
        _journal=journal,
        _numbers={each.rank: each.number for each in alike} if len(alike) > 1 else {},
    )
    return simulation if cluster.crowding == 1 or plan.pp == 1 else _with_lent_cores(simulation)


@dataclass(frozen=True)
class _Course:
    """What one rank at each place along the pipeline does; with shares, a rank of one group that is alike.

    Attributes:
        rank: The rank at the first place.
        number: Ranks along dp that do the same.
        order: The actions and messages of the schedule's table.
        times: Times of the stages without communication beside them.
        programs: The programs of the ranks.
        links: The links between them.
    """

    rank: int
    number: int
    order: CommonOrder
    times: Times
    programs: Sequence[RankProgram]
    links: Mapping[tuple[int, int], Link]

    @classmethod
    def of(cls, alike: Alike[Costs]) -> _Course:
        """Return the course of the ranks of one group."""
        costs, plan, batch, first, number = alike
        rank, count = Groups.of(plan).dp.ranks(0)[first], plan.microbatches_of(batch)
        stages = stage_programs(plan, costs, count, rank)
        times, order = undisturbed_times(stages, costs.sends(plan)), order_of(plan, costs, stages, count)
        programs = rank_programs(plan, costs, order.schedule, stages, rank)
        return cls(rank, number, order, times, programs, links_of(plan, costs, order.pairs))

    def play(self, lateness: float, steps: int = 1, journal: Journal | None = None) -> Play:
        """Play steps."""
        return play_steps(
            self.order, self.programs, self.links, lateness=lateness, steps=steps, journal=journal
        )

    def lateness(self, late: float, end: float, last: float) -> float:
        """Return the wait at a step's end as a share of what was before, if a step takes `last` seconds.

        Args:
            late: The share where ranks wait for none but their like.
            end: Seconds of a step then.
            last: Seconds of a step of the slowest ranks.
        """
        if end == last:
            return late
        (program,) = self.programs
        after = program.update + (0.0 if program.norm is None else program.norm.seconds)
        return (last - after) / (end - after) * (1 + late) - 1


def _with_lent_cores(simulation: Simulation) -> Simulation:
    """Rescale times where ranks outnumber cores: a rank that waits in a pipeline lends its core to others.

    Waits of other kinds need no rescaling: they were measured while waiting ranks lent their cores.
    """
    cluster, plan = simulation.cluster, simulation.plan
    alike = plan.ranks // plan.pp  # ranks that do the same at the same time; one of them was played
    busy = list(simulation._journal.busy()) * alike
    end = simulation.seconds * simulation.steps
    nodes = cluster.devices // cluster.devices_per_node
    pace = crowded_seconds(end, busy, cluster.devices, nodes * cluster.cores) / end
    return replace(simulation, seconds=pace * simulation.seconds, _pace=pace)


def _at_pace(span: Span, pace: float) -> Span:
    return replace(span, start=span.start * pace, duration=span.duration * pace)


def picture(simulation: Simulation, title: str) -> str:
    """Return the first step as SVG, with the bubble that the breakdown has.

    Rows end where the step ends. What no box covers is bubble, exposed communication or the optimizer.

    Args:
        simulation: The simulated steps.
        title: Description of the picture, for readers who cannot see it.
    """
    breakdown, pace = simulation.breakdown, simulation._pace
    played = replace(
        simulation.played,
        starts=tuple(tuple(pace * start for start in row) for row in simulation.played.starts),
        stops=tuple(tuple(pace * stop for stop in row) for row in simulation.played.stops),
    )
    schedule, parts = played.schedule, breakdown.parts
    stages = f", {schedule.virtual} stages each" if schedule.virtual > 1 else ""
    caption = (
        f"{schedule.ranks} ranks{stages}, {schedule.microbatches} micro-batches: a step of "
        f"{format_seconds(parts.wall)}, bubble {parts.bubble / parts.wall:.1%}, exposed communication "
        f"{parts.exposed_communication / parts.wall:.1%}"
    )
    panel = Panel(
        played=played,
        caption=caption,
        ideal=max(each.parts.wall - each.parts.bubble for each in breakdown.ranks),
        end=parts.wall,
        label=format_seconds,
    )
    return draw_panels([panel], title)
