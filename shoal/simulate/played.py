"""The seconds of a played step, without its Timeline: what a search asks for hundreds of times.

The player is the one of `simulate`, and notes nothing. In a pipeline with many micro-batches the middle of a
step repeats: once every action starts as much later than the same action of the micro-batches a round before,
on all ranks, all further rounds take as long. So a shorter table is played first. If its middle repeats, the
other rounds are added; if not, longer tables are tried, and at last the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.cost import Costs
from shoal.cost.time import straggler_share
from shoal.plan import SettledPlan
from shoal.plan.schedules import FOUND, Work
from shoal.simulate.course import Course, course_of, made_course
from shoal.simulate.engine import Actions, play_steps
from shoal.simulate.programs import (
    alike_programs,
    links_of,
    rank_programs,
    undisturbed_times,
)
from shoal.simulate.simulation import simulate
from shoal.simulate.stage_program import StageProgram

__all__ = ["played_seconds"]

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
    count = plan.microbatches_of(batch)
    stages = alike_programs(plan, costs, count)
    for rounds in _ROUNDS if plan.schedule != FOUND else ():
        short = rounds * plan.pp + count % plan.pp
        if 2 * short > count:
            break
        end, actions, course = _play(costs, plan, stages, short)
        every = _repeats(course, actions, plan.pp, end)
        if every is not None:
            return end + (count - short) // plan.pp * every
    return _play(costs, plan, stages, count)[0]


def _play(
    costs: Costs, plan: SettledPlan, stages: Sequence[StageProgram], count: int
) -> tuple[float, Actions, Course]:
    course = _course(costs, plan, stages, count)
    end, (actions,) = play_steps(
        course,
        rank_programs(plan, costs, course.schedule, stages, is_named=False),
        links_of(plan, costs, course),
        contention=costs.cluster.device.contention,
        lateness=straggler_share(costs.cluster),
    )
    return end, actions, course


def _repeats(course: Course, actions: Actions, ranks: int, end: float) -> float | None:
    """Return the seconds of a round of as many micro-batches as ranks; None if the middle does not repeat."""
    middle = course.schedule.microbatches // 2
    least, most = math.inf, -math.inf
    for row, times in zip(course.schedule.table, actions, strict=True):
        first: dict[tuple[Work, int, int], float] = {}
        for action, (start, _) in zip(row, times, strict=True):
            if middle - ranks <= action.microbatch < middle:
                first[action.work, action.stage, action.microbatch + ranks] = start
            elif middle <= action.microbatch < middle + ranks:
                before = first.get((action.work, action.stage, action.microbatch))
                if before is None:
                    return None
                least, most = min(least, start - before), max(most, start - before)
    return most if most - least <= _EQUAL * end else None


def _course(costs: Costs, plan: SettledPlan, stages: Sequence[StageProgram], count: int) -> Course:
    if plan.pp == 1:
        return made_course("1f1b", 1, 1, count)
    if plan.schedule != FOUND:
        return made_course(plan.schedule, plan.pp, plan.stages // plan.pp, count)
    times = undisturbed_times(stages, costs.sends(plan))
    return course_of(plan.schedule_for(count, times))
