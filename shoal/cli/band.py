"""The band of a predicted step, for the commands that predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.units import format_seconds

if TYPE_CHECKING:
    from shoal.cluster import Cluster
    from shoal.plan import Plan
    from shoal.workload import Workload

__all__ = ["WITHIN", "band_summary", "band_text", "within"]

WITHIN = "90 % within"
"""Words before the two ends of a band."""


def band_summary(workload: Workload, cluster: Cluster, plan: Plan, seconds: float) -> dict[str, Any]:
    """Return the band of a step with these predicted seconds, as `--json` has it."""
    from shoal.cost.outlook import band_of

    band = band_of(workload, cluster, plan)
    low, high = band.around(seconds)
    return {"step_seconds_low": low, "step_seconds_high": high, "validated": band.validated}


def within(summary: Mapping[str, Any]) -> str:
    """Return the two ends of a band."""
    low, high = (format_seconds(summary[f"step_seconds_{end}"]) for end in ("low", "high"))
    return f"{low} to {high}"


def band_text(summary: Mapping[str, Any]) -> str:
    """Return the words about the band of a step."""
    return f"{WITHIN} {within(summary)} ({summary['validated']})"
