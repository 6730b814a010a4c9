"""Advice from playing other Plans on the run's machines, as corrected by the run itself.

The description of the machines is calibrated with the run. What is left of its error then bounds what is
advised: a gain must be larger than the error of the prediction of the run's own Plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.advise.advice import LEAST_GAIN, Advice
from shoal.cluster import Cluster
from shoal.cost import Costs, calibrate
from shoal.cost.outlook import Observation
from shoal.errors import PlanError, UserError
from shoal.plan import SettledPlan
from shoal.planner import ALL_SIZES, changed, choose
from shoal.simulate import played_seconds
from shoal.timeline import Breakdown, Timeline
from shoal.workload import Workload


def played_advice(
    timeline: Timeline,
    breakdown: Breakdown,
    plan: SettledPlan,
    batch: int,
    workload: Workload,
    cluster: Cluster,
) -> Iterator[Advice]:
    """Yield advice on the bucket, and on the whole Plan, that playing on the calibrated machines gives."""
    try:
        observation = Observation.of(workload, plan, batch, timeline)
        machines = calibrate(cluster, [observation]).cluster
        costs = Costs(workload, machines)
        now = played_seconds(costs, plan, batch)
    except UserError:  # such as machines that cannot be calibrated by unequal shares
        return
    wall = breakdown.parts.wall
    error = abs(now / wall - 1)
    rests = (
        f"Played on {cluster.name}, calibrated with this run; its own step is then predicted with an error of"
    )

    def advice(name: str, change: str, found: SettledPlan, seconds: float) -> Advice | None:
        saved = 1 - seconds / now
        if saved < max(LEAST_GAIN, error):
            return None
        return Advice(
            name=name,
            change=change,
            settings=(f'plan="{found}"',),
            before=wall,
            after=wall * seconds / now,
            reason=f"{rests} {error:.1%}.",
        )

    buckets = [found for size in ALL_SIZES if (found := changed(plan, batch, bucket=size)) is not None]
    if plan.dp > 1 and buckets:
        seconds, best = min(
            ((played_seconds(costs, each, batch), each) for each in buckets), key=lambda of: of[0]
        )
        told = advice(
            "bucket", f"Communicate gradients in other buckets: bucket={best.bucket}.", best, seconds
        )
        if told is not None:
            yield told
    try:
        chosen = choose(workload, machines, batch, precision=plan.precision).best
    except PlanError:
        return
    told = advice("plan", f"Lay the model out by another Plan: {chosen.layout}.", chosen.plan, chosen.seconds)
    if told is not None:
        yield told
