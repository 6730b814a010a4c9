"""The speed of a run: one definition for all who report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["tokens_per_second"]

_WARM_UP_STEPS = 2  # steps in which caches fill and kernels are chosen


def tokens_per_second(metrics: Sequence[Mapping[str, Any]], since_step: int | None) -> float | None:
    """Return the tokens/s, over all ranks, of the median step after warm-up; None if no step has them.

    The median ignores a step that was held up by a checkpoint or another process.

    Args:
        metrics: Metrics from `read_metrics`.
        since_step: The first step under the present layout; None for all.
    """
    rates = [
        values["tokens_per_second"]
        for values in metrics
        if "tokens_per_second" in values and values["step"] >= (since_step or 0)
    ]
    return median(rates[_WARM_UP_STEPS:] or rates) if rates else None
