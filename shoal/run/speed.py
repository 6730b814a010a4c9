"""The speed of a run: one definition for all who report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_WARM_UP_STEPS = 2  # steps in which caches fill and kernels are chosen


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a run; a figure that is not known is None.

    Attributes:
        total: Tokens/s over all ranks.
        per_device: Tokens/s of a device.
        mfu: Model FLOP/s as a share of the device's peak.
    """

    total: float | None
    per_device: float | None
    mfu: float | None


def speed_of(metrics: Sequence[Mapping[str, Any]], description: Mapping[str, Any]) -> Speed:
    """Return the speed of the median step after warm-up.

    Args:
        metrics: Metrics from `read_metrics`.
        description: The content of run.json; it has the FLOP of a token, forward and backward, and the peak
            of one device.
    """
    total = tokens_per_second(metrics, description.get("since_step"))
    world_size = description.get("world_size")
    flops_per_token = (description.get("model") or {}).get("flops_per_token")
    peak_flops = (description.get("device") or {}).get("peak_flops")
    per_device = total / world_size if total is not None and world_size else None
    mfu = None
    if per_device is not None and flops_per_token and peak_flops:
        mfu = per_device * flops_per_token / peak_flops
    return Speed(total, per_device, mfu)


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
