"""Advice on the time in which a device waits for its host: for data, and for launches."""

from __future__ import annotations

import math

from shoal.advise.advice import LEAST_GAIN, Advice
from shoal.plan import SettledPlan
from shoal.planner import changed
from shoal.timeline import Breakdown

__all__ = ["data_advice", "launch_advice"]


def data_advice(breakdown: Breakdown) -> Advice | None:
    """Return advice on the wait for data, of the rank that waits most; None if it is short."""
    parts = max((rank.parts for rank in breakdown.ranks), key=lambda parts: parts.data_wait)
    wall, waits = parts.wall, parts.data_wait
    if waits < LEAST_GAIN * wall:
        return None
    # While a step computes, so much data must be made that none is waited for.
    workers = math.ceil(wall / (wall - waits)) if waits < wall else 2
    return Advice(
        name="data",
        change=f"Prepare data beside the training: {workers} processes or more (Trainer(workers={workers})), "
        "or a loader that does less for each sample.",
        settings=(),
        before=wall,
        after=wall - waits,
        is_bound=True,
        reason=f"Measured: a rank waits {waits:.4g} s of each step for data.",
    )


def launch_advice(breakdown: Breakdown, plan: SettledPlan, batch: int) -> Advice | None:
    """Return advice on launches, which a GPU waits for; None if they cost little."""
    launch, wall = breakdown.parts.launch or 0.0, breakdown.parts.wall
    if launch < LEAST_GAIN * wall:
        return None
    found = changed(plan, batch, compile="blocks") if plan.compile != "blocks" else None
    larger = "Make larger micro-batches: more work for each launch."
    return Advice(
        name="launch",
        change=larger if found is None else "Compile blocks: fewer launches.",
        settings=() if found is None else (f'plan="{found}"',),
        before=wall,
        after=wall - launch,
        is_bound=True,
        reason=f"Measured: the device idles for {launch:.4g} s of each step until the host gives it work.",
    )
