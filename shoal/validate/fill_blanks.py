"""The Plan of a row that leaves settings open: the one that its authors most likely chose.

This is the quickest Plan that fits. There may be thousands, so not all are played. Each Plan first waits in a
heap with a lower bound on its time. When its bound is the least of all, there are two cases. If the Plan is
too large, it waits again with the next recompute policy, which takes longer; if it fits, it waits again with
the seconds of its played step. The first Plan with played seconds to be the least is the quickest. If even
the smallest micro-batch does not fit with the most recompute, no larger one is tried.
"""

from __future__ import annotations

import heapq
from functools import cache

from shoal.cost import Costs, Memories
from shoal.plan import SettledPlan
from shoal.planner.bucket import usual_bucket
from shoal.simulate import played_seconds
from shoal.validate.steps import Measured

__all__ = ["fill_blanks"]


def fill_blanks(row: Measured, costs: Costs, memories: Memories) -> SettledPlan:
    """Return the quickest of a row's Plans that fit; if none fits, the quickest of all.

    Args:
        row: A row of a table.
        costs: Costs of the row's workload on its cluster.
        memories: Memory of the row's workload on its cluster.
    """
    if len(row.plans) == 1 and len(row.recomputes) == 1:
        return _bucketed(row.plans[0], costs)
    smallest = min(plan.microbatch or 0 for plan in row.plans)

    @cache
    def fits(plan: SettledPlan) -> bool:
        return memories.fullest(plan, row.batch).fits(costs.cluster)

    waiting = [(_least(plan, row, costs), order, False, plan) for order, plan in enumerate(row.plans)]
    heapq.heapify(waiting)
    while waiting:
        _, order, is_whole, plan = heapq.heappop(waiting)
        if is_whole:
            return plan
        if not fits(plan.replace(microbatch=smallest, recompute=row.recomputes[-1])):
            continue
        if fits(plan):
            whole = _bucketed(plan, costs)
            heapq.heappush(waiting, (played_seconds(costs, whole, row.batch), order, True, whole))
            continue
        later = row.recomputes[row.recomputes.index(plan.recompute) + 1 :]
        if later:
            longer = plan.replace(recompute=later[0])
            heapq.heappush(waiting, (_least(longer, row, costs), order, False, longer))
    plans = (_bucketed(plan, costs) for plan in row.plans)
    return min(plans, key=lambda plan: played_seconds(costs, plan, row.batch))


def _bucketed(plan: SettledPlan, costs: Costs) -> SettledPlan:
    """Return the Plan with buckets that suit the links: no table states their size."""
    return plan.replace(bucket=usual_bucket(costs.cluster, plan))


def _least(plan: SettledPlan, row: Measured, costs: Costs) -> float:
    """Return a lower bound on the seconds of a step."""
    return costs.least(_bucketed(plan, costs), row.batch)
