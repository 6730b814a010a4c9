"""The seconds of a played step, without its Timeline: what a search asks for hundreds of times.

The player is the one of `simulate`, and notes nothing. In a pipeline with many micro-batches the middle of a
step repeats: once every action starts as much later than the same action of the micro-batches a round before,
on all ranks, all further rounds take as long. So a shorter table is played first. If its middle repeats, the
other rounds are added; if not, longer tables are tried, and at last the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shoal.predict.cost import Alike, Costs
from shoal.predict.cost.time import straggler_share
from shoal.predict.simulate.engine import Play, play_steps
from shoal.predict.simulate.programs import (
    links_of,
    order_of,
    rank_programs,
    stage_programs,
)
from shoal.predict.simulate.simulation import simulate
from shoal.predict.simulate.stage_program import StageProgram
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.schedules import FOUND, CommonOrder, play_in_order
from shoal.spec.workload import Parameters

_EQUAL = 1e-9  # of a step: rounding in sums of a step's times
_ROUNDS = (6, 12, 24)  # of as many micro-batches as ranks


def played_seconds(costs: Costs, plan: SettledPlan, batch: int) -> float:
    """Return the seconds of a step as `simulate` plays it.

    Args:
        costs: Costs of the model on a cluster with as many devices as the Plan has ranks.
        plan: The Plan, with a fixed micro-batch.
        batch: Samples of a step.
    """
    if costs.cluster.crowding > 1 and plan.pp > 1:
        return simulate(costs.workload, costs.cluster, plan, batch).seconds
    return max(_played_step(each).seconds for each in costs.alike(plan, batch))


def played_passes(costs: Costs, plan: SettledPlan, count: int) -> float:
    """Return the seconds of a pipeline's passes, as if no gradients or weights were exchanged.

    Any sharding takes longer. The arguments are those of `played_seconds`, with the number of micro-batches.
    """
    stages = stage_programs(plan, costs, count, exchanges=False)
    return _played(plan, count, 0.0, partial(_play_passes, costs, plan, stages)).seconds


def played_parts(costs: Costs, plan: SettledPlan, batch: int) -> dict[str, float]:
    """Return where the seconds of a played step go on the rank that waits least.

    The parts are "compute", the purposes of exposed communication (`shoal.spec.timeline.Purpose`; "control"
    is the wait for the slowest rank), "bubble" (waits for a rank along the pipeline that has not sent yet)
    and "optimizer". Their sum is the step. The arguments are those of `played_seconds`.
    """
    every = [(_played_step(each), each) for each in costs.alike(plan, batch)]
    played, slowest = max(every, key=lambda each: each[0].seconds)
    waits, update = played.waits(), _updates(*slowest[:3])
    place = min(range(len(waits)), key=lambda each: sum(waits[each].values()) + update[each])
    parts = {"optimizer": update[place], **waits[place]}
    return {"compute": played.seconds - sum(parts.values()), **parts}


@dataclass(frozen=True)
class _Played:
    """A step of which a shorter table was played, and the rounds of its middle that were not.

    Attributes:
        seconds: Seconds of the whole step.
        play: The play of the shorter table, or of the whole one.
        rounds: Rounds of the middle that were not played.
        longer: Plays the table with one round more.
    """

    seconds: float
    play: Play
    rounds: int
    longer: Callable[[], tuple[CommonOrder, Play]]

    def waits(self) -> list[dict[str, float]]:
        """Return the waits of the whole step by place."""
        if not self.rounds:
            return self.play.waits
        return [
            {
                what: one.get(what, 0.0) + self.rounds * (seconds - one.get(what, 0.0))
                for what, seconds in other.items()
            }
            for one, other in zip(self.play.waits, self.longer()[1].waits, strict=True)
        ]


def _played_step(alike: Alike[Costs]) -> _Played:
    """Play a step of ranks that are alike."""
    costs, plan, batch, *_ = alike
    count = plan.microbatches_of(batch)
    stages = stage_programs(plan, costs, count)
    return _played(plan, count, straggler_share(plan, costs.cluster), partial(_play, costs, plan, stages))


def _played(
    plan: SettledPlan, count: int, late: float, play: Callable[[int], tuple[CommonOrder, Play]]
) -> _Played:
    """Play the shortest table whose middle repeats.

    Args:
        plan: The Plan.
        count: Micro-batches of a step.
        late: The share of the rounds that are not played by which ranks wait for the slowest.
        play: Plays a table with so many micro-batches.
    """
    for short in _short(plan, count):
        order, shorter = play(short)
        every = _repeats(order, shorter)
        if every is not None:
            rounds = (count - short) // plan.pp
            seconds = shorter.end + rounds * every * (1 + late)
            return _Played(seconds, shorter, rounds, partial(play, short + plan.pp))
    whole = play(count)[1]
    return _Played(whole.end, whole, 0, partial(play, count))


def _updates(costs: Costs, plan: SettledPlan, batch: int) -> list[float]:
    count = plan.microbatches_of(batch)
    stages = stage_programs(plan, costs, count)
    placement = plan.placement if plan.pp > 1 else (0,)
    held = [Parameters()] * plan.pp
    for stage, place in zip(stages, placement, strict=True):
        held[place] += stage.data_parallel.parameters
    return [costs.after_at(plan, place, each, count) for place, each in enumerate(held)]


def _short(plan: SettledPlan, count: int) -> Iterator[int]:
    """Yield numbers of micro-batches of tables that are much shorter than the whole one."""
    for rounds in _ROUNDS if plan.schedule != FOUND else ():
        short = rounds * plan.pp + count % plan.pp
        if 2 * short <= count:
            yield short


def _play(
    costs: Costs, plan: SettledPlan, stages: Sequence[StageProgram], count: int
) -> tuple[CommonOrder, Play]:
    """Play a step of so many micro-batches."""
    order = order_of(plan, costs, stages, count)
    programs = rank_programs(plan, costs, order.schedule, stages)
    links, late = links_of(plan, costs, order.pairs), straggler_share(plan, costs.cluster)
    return order, play_steps(order, programs, links, lateness=late)


def _play_passes(
    costs: Costs, plan: SettledPlan, stages: Sequence[StageProgram], count: int
) -> tuple[CommonOrder, Play]:
    """Play forwards and backwards without any exchange, up to the wait for the slowest rank."""
    order = order_of(plan, costs, stages, count)
    passages = [
        stages[stage].passage(work, is_first=is_first, is_last=is_last)
        for work, stage, is_first, is_last in order.slots
    ]
    links, late = links_of(plan, costs, order.pairs), straggler_share(plan, costs.cluster)
    seconds = [links[pair].seconds for pair in order.pairs]
    played = play_in_order(order, [each.seconds for each in passages], seconds)
    last = max(played.stops)
    return order, Play(last + late * last, played.starts)


def _repeats(order: CommonOrder, play: Play) -> float | None:
    """Return the seconds of a round of as many micro-batches as ranks; None if the middle does not repeat."""
    if order.rounds is None:
        return None
    later = [
        starts[other] - starts[one]
        for starts, pairs in zip(play.starts, order.rounds, strict=True)
        for one, other in pairs
    ]
    least, most = min(later, default=math.inf), max(later, default=-math.inf)
    return most if most - least <= _EQUAL * play.end else None
