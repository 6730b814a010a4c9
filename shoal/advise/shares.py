"""Advice: shares of the batch in proportion to the speed that ranks showed.

The seconds of a rank's micro-batch are those of its forward and backward without waits, which all-reduces do
not make equal. If the same rank is the slowest in nearly all steps, fewer micro-batches for it keep the
others from waiting: `shoal.planner.in_proportion` hands them out. Smaller micro-batches are tried too; their
time is taken to be in proportion to their size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

from shoal.advise.advice import LEAST_GAIN, Advice
from shoal.plan import Mesh, SettledPlan, Shares, divisors
from shoal.planner import changed, in_proportion
from shoal.timeline import Breakdown, Kind, Timeline
from shoal.timeline.kinds import kinds_of_step
from shoal.timeline.windows import StepWindows

_PERSISTENT = 0.8
"""Share of the steps in which a rank must be the slowest."""


def shares_advice(timeline: Timeline, breakdown: Breakdown, plan: SettledPlan, batch: int) -> Advice | None:
    """Return advice on shares; None if the Plan takes none, ranks are alike, or the gain is small."""
    waits = plan.pp > 1 or plan.ep > 1 or plan.sharding.communicates_each_micro_batch
    if plan.dp == 1 or waits or len(breakdown.ranks) != plan.ranks:
        return None
    by_step = _seconds_by_step(timeline, breakdown, plan)
    if not by_step:
        return None
    slowest = Counter(max(range(plan.dp), key=seconds.__getitem__) for seconds in by_step.values())
    index, times = slowest.most_common(1)[0]
    if times < _PERSISTENT * len(by_step):
        return None
    made = [_made(plan, batch, rank) for rank in range(plan.dp)]
    now = [median(seconds[rank] for seconds in by_step.values()) for rank in range(plan.dp)]
    each = [seconds / count for seconds, count in zip(now, made, strict=True)]
    best, work = None, max(now)
    for microbatch in divisors(batch):
        if microbatch > plan.microbatch:
            continue
        smaller = [seconds * microbatch / plan.microbatch for seconds in each]
        numbers = in_proportion(smaller, batch // microbatch)
        if numbers is None or len(set(numbers)) == 1:
            continue
        longest = max(number * seconds for number, seconds in zip(numbers, smaller, strict=True))
        found = changed(plan, batch, microbatch=microbatch, shares=str(Shares.of(numbers)))
        # Of equally good ones the largest micro-batch, which runs best, comes last.
        if found is not None and longest <= work:
            best, work = found, longest
    wall = breakdown.parts.wall
    after = wall - (max(now) - work)
    if best is None or after > (1 - LEAST_GAIN) * wall:
        return None
    return Advice(
        name="shares",
        change=f"Give slower ranks fewer micro-batches: shares={best.shares}.",
        settings=(f'plan="{best}"',),
        before=wall,
        after=after,
        reason=(
            f"Measured: along dp, rank {index} takes {max(now):.4g} s for forward and backward, the quickest "
            f"{min(now):.4g} s; it is the slowest in {times / len(by_step):.0%} of the steps."
        ),
    )


def _made(plan: SettledPlan, batch: int, index: int) -> int:
    return plan.microbatches_of(batch) if plan.shared is None else plan.shared.of_rank(index)


def _seconds_by_step(
    timeline: Timeline, breakdown: Breakdown, plan: SettledPlan
) -> dict[int, Mapping[int, float]]:
    """Return the seconds of forward and backward in each counted step, by index along dp."""
    mesh = Mesh.of(plan)
    found: dict[int, dict[int, float]] = {}
    for rank in breakdown.ranks:
        windows = StepWindows(timeline, rank.rank)
        spans = windows.share_out((span, span) for span in timeline.of(rank.rank))
        index = mesh.coordinate(rank.rank, "dp")
        for step in rank.counted:
            kinds = kinds_of_step(windows[step], spans[step], ())
            seconds = kinds[Kind.FORWARD] + kinds[Kind.BACKWARD]
            of_step = found.setdefault(step, {})
            of_step[index] = max(seconds, of_step.get(index, 0.0))
    return {step: seconds for step, seconds in found.items() if len(seconds) == plan.dp}
