"""The seconds of a played step, without its Timeline: what a search asks for hundreds of times.

The player is the one of `simulate`, and notes nothing. In a pipeline with many micro-batches the middle of a
step repeats: each further round of micro-batches takes as long as the one before. A long table is therefore
not played to its end: three short ones that differ by a round are, and if both differences are equal, all
other rounds take as long. If not, longer tables are tried, and at last the whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.cost import Costs
from shoal.cost.outlook import straggler_share
from shoal.plan import SettledPlan
from shoal.plan.schedules import FOUND
from shoal.simulate.course import Course, course_of, made_course
from shoal.simulate.engine import play_steps
from shoal.simulate.programs import (
    alike_programs,
    links_of,
    rank_programs,
    transfers_of,
    undisturbed_times,
)
from shoal.simulate.simulation import simulate
from shoal.simulate.stage_program import StageProgram

__all__ = ["played_seconds"]

_EQUAL = 1e-9  # of a step: rounding in sums of a step's times
_ROUNDS = (2, 4, 8)  # of as many micro-batches as ranks, before the first of the three tables ends


def played_seconds(costs: Costs, plan: SettledPlan, batch: int) -> float:
    """Return the seconds of a step as `simulate` plays it.

    Args:
        costs: Costs of the model on a cluster with as many devices as the Plan has ranks.
        plan: The Plan, with a fixed micro-batch.
        batch: Samples of a step.
    """
    if costs.cluster.crowding > 1 and plan.pp > 1:
        return simulate(costs.workload, costs.cluster, plan, batch).seconds
    count = plan.microbatches_of(batch)
    stages = alike_programs(plan, costs, count)
    for rounds, first in _short(plan, count):
        short, longer, longest = (_seconds(costs, plan, stages, first + more * rounds) for more in range(3))
        each = longest - longer
        if abs(each - (longer - short)) <= _EQUAL * longest:
            return longest + (count - first - 2 * rounds) / rounds * each
    return _seconds(costs, plan, stages, count)


def _short(plan: SettledPlan, count: int) -> Iterator[tuple[int, int]]:
    """Yield the micro-batches of a round, and those of a table that is much shorter than `count`."""
    if plan.schedule == FOUND:
        return
    if plan.pp == 1:
        if count > 4:
            yield 1, 2
        return
    for times in _ROUNDS:
        first = times * plan.pp + count % plan.pp
        if 3 * (first + plan.pp) < count:
            yield plan.pp, first


def _seconds(costs: Costs, plan: SettledPlan, stages: Sequence[StageProgram], count: int) -> float:
    course = _course(costs, plan, stages, count)
    end, _ = play_steps(
        course,
        rank_programs(plan, costs, course.schedule, stages),
        links_of(plan, costs, course),
        contention=costs.cluster.device.contention,
        lateness=straggler_share(costs.cluster),
    )
    return end


def _course(costs: Costs, plan: SettledPlan, stages: Sequence[StageProgram], count: int) -> Course:
    if plan.pp == 1:
        return made_course("1f1b", 1, 1, count)
    if plan.schedule != FOUND:
        return made_course(plan.schedule, plan.pp, plan.stages // plan.pp, count)
    times = undisturbed_times(stages, transfers_of(plan, costs))
    return course_of(plan.schedule_for(count, times))
