"""The Plan of a row that leaves settings open: the one that its authors most likely chose.

This is the quickest Plan that fits. There may be thousands, so not all are played. Each Plan first waits in a
heap with a lower bound on its time. When its bound is the least of all, there are two cases. If the Plan is
too large, it waits again with the next recompute policy, which takes longer; if it fits, it waits again with
the seconds of its played step. The first Plan with played seconds to be the least is the quickest. If even
the smallest micro-batch does not fit with the most recompute, no larger one is tried.

Programs with fused kernels of their own can recompute some layers whole, as many as memory needs (Megatron's
`recompute_num_layers`). So where recompute=full fits and the policy before does not, the quantities of both
Plans are mixed: memory and seconds grow with the share of the layers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from shoal.cost import Costs, Memories
from shoal.plan import SettledPlan
from shoal.planner.bucket import usual_bucket
from shoal.simulate import played_seconds
from shoal.validate.steps import Measured


class Filled(NamedTuple):
    """The Plan of a row.

    Attributes:
        plan: The Plan.
        lighter: The same Plan with the recompute of the layers that are not recomputed whole; None if there
            are none.
        share: Share of the layers that are recomputed as `plan` says.
    """

    plan: SettledPlan
    lighter: SettledPlan | None = None
    share: float = 1.0

    def mixed(self, quantity: Callable[[SettledPlan], float]) -> float:
        """Return a quantity of a Plan, such as its seconds, over all layers."""
        found = quantity(self.plan)
        if self.lighter is None:
            return found
        return self.share * found + (1 - self.share) * quantity(self.lighter)


def fill_blanks(row: Measured, costs: Costs, memories: Memories) -> Filled:
    """Return the quickest of a row's Plans that fit; if none fits, the quickest of all.

    Args:
        row: A row of a table.
        costs: Costs of the row's workload on its cluster.
        memories: Memory of the row's workload on its cluster.
    """
    if len(row.plans) == 1 and len(row.recomputes) == 1:
        return Filled(_bucketed(row.plans[0], costs))
    smallest = min(plan.microbatch or 0 for plan in row.plans)

    @cache
    def fits(plan: SettledPlan) -> bool:
        return memories.fullest(plan, row.batch).fits(costs.cluster)

    def play(order: int, filled: Filled) -> None:
        seconds = filled.mixed(lambda plan: played_seconds(costs, plan, row.batch))
        heapq.heappush(waiting, (seconds, order, True, filled))

    waiting = [(_least(plan, row, costs), order, False, Filled(plan)) for order, plan in enumerate(row.plans)]
    heapq.heapify(waiting)
    while waiting:
        _, order, is_played, filled = heapq.heappop(waiting)
        if is_played:
            return filled
        plan = filled.plan
        if not fits(plan.replace(microbatch=smallest, recompute=row.recomputes[-1])):
            continue
        if fits(plan):
            play(order, Filled(_bucketed(plan, costs)))
            continue
        later = row.recomputes[row.recomputes.index(plan.recompute) + 1 :]
        if not later:
            continue
        longer = plan.replace(recompute=later[0])
        if longer.recompute == "full" and row.program is None and fits(longer):
            over, under = (memories.fullest(each, row.batch).peak for each in (plan, longer))
            share = (over - costs.cluster.device.memory) / (over - under)
            play(order, Filled(_bucketed(longer, costs), _bucketed(plan, costs), share))
        else:
            heapq.heappush(waiting, (_least(longer, row, costs), order, False, Filled(longer)))
    plans = (_bucketed(plan, costs) for plan in row.plans)
    return Filled(min(plans, key=lambda plan: played_seconds(costs, plan, row.batch)))


def _bucketed(plan: SettledPlan, costs: Costs) -> SettledPlan:
    """Return the Plan with buckets that suit the links: no table states their size."""
    return plan.replace(bucket=usual_bucket(costs.cluster, plan))


def _least(plan: SettledPlan, row: Measured, costs: Costs) -> float:
    """Return a lower bound on the seconds of a step."""
    return costs.least(_bucketed(plan, costs), row.batch)
