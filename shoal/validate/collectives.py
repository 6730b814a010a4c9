"""Tables of timed collectives, as nccl-tests prints them: one row is one size on one machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cluster import PRESETS, Cluster
from shoal.cluster.tables import matching
from shoal.errors import ClusterError
from shoal.validate.cells import Refuse, Row, Table, count, measured, strictly, word

__all__ = ["COLUMNS", "LEAST_BYTES", "USUAL_NODE", "MeasuredCollective", "read_collectives"]

LEAST_BYTES = 64 * 1024
"""Smaller buffers are left out: their times measure the library's protocols for tiny messages."""

USUAL_NODE = 8
"""Devices of a node, if a table has devices within one node."""

_ALGORITHMS = {r"\bRing\b": "ring", r"^(algo=)?NVLS": "switch"}
"""The algorithm that a note names, if it was forced."""

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def _bytes(cell: str) -> int:
    """Read a size; nccl-tests prints 0 if a buffer is too small for its ranks."""
    return 0 if cell == "0" else count(cell)


def _stated(cell: str) -> int | None:
    """Read a count; return None if the source is not sure of it, such as "16?"."""
    return None if cell.endswith("?") else count(cell)


COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "op": word(*_COLLECTIVES),
    "platform": word(),
    "nodes": _stated,
    "ranks": _stated,
    "size_bytes": _bytes,
    "time_us": measured,
    "note": str,
}
"""The columns of a table, with a reader for their cells. Further columns are ignored."""

_OPTIONAL = frozenset(("nodes", "ranks", "time_us", "note"))


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One row of the table.

    Attributes:
        line: Line of the file.
        settings: Its cells without the measurements, as text.
        collective: Name of the collective.
        platform: The machine, as the table names it.
        cluster: The machine, as a preset Cluster.
        nbytes: Bytes of the whole buffer, as nccl-tests counts.
        algorithm: The forced algorithm, as shoal.cost.collectives.network names it; None for the library's
            choice.
        seconds: Measured seconds.
    """

    line: int
    settings: str
    collective: str
    platform: str
    cluster: Cluster
    nbytes: int
    algorithm: str | None
    seconds: float


def read_collectives(path: str | Path, refuse: Refuse = strictly) -> list[MeasuredCollective]:
    """Read a table of timed collectives; skip small buffers, and rows that do not say which ranks took part.

    Args:
        path: Path of the file.
        refuse: Called with the errors of rows that cannot be used.

    Raises:
        DataError: The file is missing, lacks a column, or has a cell that cannot be read.
        ClusterError: A row names an unknown machine.
    """
    found = Table.open(path).read(COLUMNS, _OPTIONAL, _measured, refuse)
    return [each for each in found if each is not None]


def _measured(row: Row) -> MeasuredCollective | None:
    if not (row["nodes"] and row["ranks"] and row["time_us"] and row["size_bytes"] >= LEAST_BYTES):
        return None
    if row["ranks"] % row["nodes"]:
        row.refuse(
            f"has {row['ranks']} ranks on {row['nodes']} nodes", possible="the same number on every node"
        )
    return MeasuredCollective(
        row.line,
        ",".join(f"{name}={value}" for name, value in row.values.items() if name != "time_us"),
        row["op"],
        row["platform"],
        _cluster(row),
        row["size_bytes"],
        next((name for said, name in _ALGORITHMS.items() if re.search(said, row["note"] or "")), None),
        row["time_us"] / 1e6,
    )


def _cluster(row: Row) -> Cluster:
    """Return the preset that the platform names, or one with the device that it names."""
    platform, ranks = row["platform"], row["ranks"]
    preset = matching("nodes", platform) or platform.lower().replace(" ", "-")
    try:
        if preset in PRESETS:
            return Cluster.preset(preset, ranks)
        in_node = ranks // row["nodes"] if row["nodes"] > 1 else max(ranks, USUAL_NODE)
        return Cluster.assemble(platform, ranks, in_node, None)
    except ClusterError as error:
        raise row.located(error) from None
