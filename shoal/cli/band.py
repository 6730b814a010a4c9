"""The band of a predicted step, for the commands that predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.units import format_seconds

if TYPE_CHECKING:
    from shoal.cluster import Cluster
    from shoal.plan import Plan
    from shoal.workload import Workload

ASIDE = "90 % in"
"""Head of the column that `aside` fills."""


def band_summary(workload: Workload, cluster: Cluster, plan: Plan, seconds: float) -> dict[str, Any]:
    """Return the band of a step with these predicted seconds, as `--json` has it."""
    from shoal.cost.outlook import band_of

    band = band_of(workload, cluster, plan)
    low, high = band.around(seconds)
    return {"step_seconds_low": low, "step_seconds_high": high, "validated": band.validated}


def aside(summary: Mapping[str, Any], seconds: float) -> str:
    """Return how far the two ends of a band are from the predicted seconds."""
    low, high = (summary[f"step_seconds_{end}"] / seconds - 1 for end in ("low", "high"))
    return f"{low:+.0%} {high:+.0%}"


def band_text(summary: Mapping[str, Any]) -> str:
    """Return the words about the band of a step."""
    low, high = (format_seconds(summary[f"step_seconds_{end}"]) for end in ("low", "high"))
    return f"90 % within {low} to {high} ({summary['validated']})"
