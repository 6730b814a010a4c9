"""The part of `shoal simulate` for `--offload`: time and memory when state is outside of the devices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shoal.cost import RankMemory
    from shoal.simulate import Simulation

__all__ = ["add_offload", "offload_summary", "offload_text"]


def add_offload(parser: argparse.ArgumentParser) -> None:
    """Add the options of offload."""
    parser.add_argument(
        "--offload",
        metavar="WHAT",
        help="also predict time and memory if the state of the `optimizer`, or the `parameters` as well, "
        "were kept outside the devices; shoal train cannot do it",
    )
    parser.add_argument(
        "--to",
        metavar="PLACE",
        default="host",
        help="place of that state: memory of the `host` (default), or a `file`",
    )


def offload_summary(
    args: argparse.Namespace, simulation: Simulation, memory: Sequence[RankMemory]
) -> dict[str, Any]:
    """Return the effect of offload as an object for JSON.

    Raises:
        ConfigError, PlanError, ClusterError: See `shoal.cost.Offload.of`.
    """
    from shoal.cost import Costs, Offload

    costs = Costs(simulation.workload, simulation.cluster)
    found = Offload.of(costs, simulation.plan, simulation.batch, args.offload, args.to)
    return {
        "what": found.what,
        "to": found.to,
        "step_seconds": simulation.seconds + found.extra,
        "exposed_seconds": dict(found.parts),
        "replaced_seconds": found.replaced,
        "link_bytes": found.link_bytes,
        "file_bytes": found.file_bytes,
        "host_bytes": found.host_bytes,
        "peak_bytes": max(each.peak - found.freed(each) for each in memory),
    }


def offload_text(summary: Mapping[str, Any]) -> str:
    """Return what offload costs and saves, as lines of text."""
    exposed = ", ".join(
        f"{name} {format_seconds(value)}" for name, value in summary["exposed_seconds"].items()
    )
    size = {name: format_bytes(round(summary[f"{name}_bytes"])) for name in ("peak", "link", "file", "host")}
    moved = f"{size['link']} over its link" + (f", {size['file']} of files" if summary["file_bytes"] else "")
    return "\n".join(
        (
            f"with offload={summary['what']} to {summary['to']}: a step of "
            f"{format_seconds(summary['step_seconds'])}, at most {size['peak']} on a device",
            f"  exposed: {exposed}; it replaces "
            f"{format_seconds(summary['replaced_seconds'])} of the optimizer",
            f"  a device moves {moved} in a step; a host keeps {size['host']}",
        )
    )
