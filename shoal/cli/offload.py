"""What `shoal simulate` prints of state that a Plan keeps outside of the devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shoal.simulate import Simulation

__all__ = ["offload_summary", "offload_text"]


def offload_summary(simulation: Simulation) -> dict[str, Any]:
    """Return the effect of the Plan's `offload` on the rank that it slows most, as an object for JSON.

    Raises:
        ClusterError: See `shoal.cost.Costs.offload`.
    """
    from shoal.cost import Costs

    costs, plan = Costs(simulation.workload, simulation.cluster), simulation.plan
    count = plan.microbatches_of(simulation.batch)
    found = max((costs.offload(plan, place, count) for place in range(plan.pp)), key=lambda each: each.extra)
    return {
        "places": plan.tiers.moved,
        "extra_seconds": found.extra,
        "exposed_seconds": dict(found.parts),
        "replaced_seconds": found.replaced,
        "link_bytes": found.link_bytes,
        "file_bytes": found.file_bytes,
        "host_bytes": found.host_bytes,
    }


def offload_text(summary: Mapping[str, Any]) -> str:
    """Return what offload costs and moves, as lines of text."""
    exposed = ", ".join(
        f"{name} {format_seconds(value)}" for name, value in summary["exposed_seconds"].items()
    )
    size = {name: format_bytes(round(summary[f"{name}_bytes"])) for name in ("link", "file", "host")}
    moved = [f"{size['link']} over its link"] * bool(summary["link_bytes"])
    moved += [f"{size['file']} of files"] * bool(summary["file_bytes"])
    return "\n".join(
        (
            f"offload adds {format_seconds(summary['extra_seconds'])} to the step: exposed {exposed}; it "
            f"replaces {format_seconds(summary['replaced_seconds'])} of the optimizer",
            f"  a device moves {' and '.join(moved) or 'nothing'} in a step; a host keeps {size['host']}",
        )
    )
