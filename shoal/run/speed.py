"""How fast a run was: one definition for all that tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["tokens_per_second"]

_WARM_UP_STEPS = 2  # in which caches fill and kernels are chosen


def tokens_per_second(metrics: Sequence[Mapping[str, Any]], since_step: int | None) -> float | None:
    """Tokens/s, over all ranks, of the median step after warm-up; None where no step tells.

    The median, so that a step that a checkpoint or another process held up does not count.

    Args:
        metrics: As `read_metrics` gives them.
        since_step: The first step under the present layout; None for all.
    """
    rates = [
        values["tokens_per_second"]
        for values in metrics
        if "tokens_per_second" in values and values["step"] >= (since_step or 0)
    ]
    return median(rates[_WARM_UP_STEPS:] or rates) if rates else None
