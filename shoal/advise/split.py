"""Advice: another split of a model into the stages of a pipeline, by what the stages took.

Blocks are alike, so the stages before the last tell what a block takes: the median of their seconds over
their blocks. A stage that takes longer for each block has a slower device. What the last stage takes beyond
its blocks is its end: the last norm and the head. `shoal.plan.stages` finds the best split for these costs;
a step changes by its `m R + (p - 1) S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from shoal.advise.advice import LEAST_GAIN, Advice
from shoal.errors import PlanError
from shoal.plan import SettledPlan
from shoal.plan.stages import Cost, split_by_cost, split_text
from shoal.planner import changed
from shoal.simulate import StageTimes
from shoal.timeline import Breakdown


def split_advice(
    stages: Sequence[StageTimes], breakdown: Breakdown, plan: SettledPlan, batch: int
) -> Advice | None:
    """Return advice on the split; None without a pipeline of one stage a rank, or if the gain is small."""
    if plan.pp == 1 or plan.stages != plan.pp or len(stages) != plan.pp or not plan.split[:1].isdecimal():
        return None
    count = plan.microbatches_of(batch)
    blocks = [int(number) for number in plan.split.split("-")]
    seconds = [stage.step / count for stage in stages]
    first = [took / number for took, number in zip(seconds[:-1], blocks[:-1], strict=True) if number]
    if not first or not blocks[-1]:
        return None
    of_block = median(first)
    end = max(0.0, seconds[-1] - blocks[-1] * of_block)
    factors = [
        took / (number * of_block) if number else 1.0
        for took, number in zip(seconds[:-1], blocks[:-1], strict=True)
    ]
    factors.append(1.0)
    costs = [
        Cost(0.0, 0.0),
        *[Cost(of_block / 3, of_block * 2 / 3)] * sum(blocks),
        Cost(end / 3, end * 2 / 3),
    ]
    try:
        pieces = split_by_cost(costs, plan.pp, microbatches=count, factors=factors)
    except PlanError:
        return None
    better = [pieces[0] - 1, *pieces[1:-1], pieces[-1] - 1]
    then = [number * of_block * factor for number, factor in zip(better, factors, strict=True)]
    then[-1] += end
    saved = (count + plan.pp - 1) * (max(seconds) - max(then))
    wall = breakdown.parts.wall
    found = changed(plan, batch, split=split_text(pieces))
    if found is None or saved < LEAST_GAIN * wall:
        return None
    return Advice(
        name="split",
        change=f"Move blocks between stages: split={found.split} in place of {plan.split}.",
        settings=(f'plan="{found}"',),
        before=wall,
        after=wall - saved,
        reason=(
            f"Measured: a micro-batch takes {max(seconds):.4g} s on the slowest stage and "
            f"{min(seconds):.4g} s on the quickest; with this split {max(then):.4g} s on the slowest."
        ),
    )
