"""Advice on the time in which a device waits for its host: for data, and for launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.advise.advice import LEAST_GAIN, Advice
from shoal.plan import SettledPlan
from shoal.planner import changed
from shoal.timeline import Breakdown


def data_advice(breakdown: Breakdown, data: Mapping[str, Any] | None = None) -> Advice | None:
    """Return advice on the wait for data, of the rank that waits most; None if it is short.

    Where text is encoded during the training, encoding is what is waited for: it takes the whole step now,
    and in n processes the n-th part.

    Args:
        breakdown: Where the time goes.
        data: The configuration of the run's data; None if it is not known.
    """
    parts = max((rank.parts for rank in breakdown.ranks), key=lambda parts: parts.data_wait)
    wall, waits = parts.wall, parts.data_wait
    if waits < LEAST_GAIN * wall:
        return None
    # While a step computes, so much data must be made that none is waited for.
    workers = math.ceil(wall / (wall - waits)) if waits < wall else 2
    if data is not None and _is_encoded(data):
        now = max(int(data.get("workers") or 0), 1)
        workers = max(now * workers, 2)
        return Advice(
            name="data",
            change=f"Encode text in {workers} processes beside the training: data.workers={workers}.",
            settings=(f"data.workers={workers}",),
            before=wall,
            after=max(wall - waits, wall * now / workers),
            reason=f"Measured: a rank waits {waits:.4g} s of each step for text that is encoded in "
            f"{now} process{'es' * (now > 1)}. Predicted for cores that have no other work.",
        )
    return Advice(
        name="data",
        change=f"Prepare data beside the training: {workers} processes or more (shoal.train.TrainingData("
        f"workers={workers})), or a loader that does less for each sample.",
        settings=(),
        before=wall,
        after=wall - waits,
        is_bound=True,
        reason=f"Measured: a rank waits {waits:.4g} s of each step for data.",
    )


def _is_encoded(data: Mapping[str, Any]) -> bool:
    """Return whether text is encoded during the training, in a way that processes share."""
    tokenizer = str(data.get("tokenizer", "bytes"))
    has_tokenizer = tokenizer != "bytes" and not tokenizer.startswith("ids:")
    return bool(data.get("streaming")) and (has_tokenizer or bool(data.get("messages")))


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
