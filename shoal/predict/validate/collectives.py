"""Tables of timed collectives, as nccl-tests prints them: one row is one size on one machine.

There are two kinds. Rows with a `platform` were measured by programs whose host launches call after call: a
call takes at least as long as its launch. Rows with a `device` are ranks of one node, and were measured
without the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import ClusterError
from shoal.predict.validate.cells import Comparison, Refuse, Row, Table, count, measured, strictly, word
from shoal.spec.cluster import PRESETS, Cluster
from shoal.spec.cluster.tables import matching
from shoal.units import format_bytes

LEAST_BYTES = 64 * 1024
"""Smaller buffers of platforms are left out: their times measure the host."""

SMALL_BYTES = 256 * 1024
"""Errors of buffers up to this size are told apart from those of larger ones."""

LAUNCH = 40e-6
"""Seconds in which a host launches a call, where a table of platforms does not tell."""

USUAL_NODE = 8
"""Devices of a node, if a table has devices within one node."""

_ALGORITHMS = {r"\bRing\b": "ring", r"^(algo=)?NVLS": "switch"}
"""The algorithm that a note names, if it was forced."""

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")

_SMALL = f" to {format_bytes(SMALL_BYTES)}"


def _operation(cell: str) -> str:
    """Read the name of a collective, as Shoal or nccl-tests write it."""
    return word(*_COLLECTIVES)("all_to_all" if cell.lower() == "alltoall" else cell)


def _bytes(cell: str) -> int:
    """Read a size; nccl-tests prints 0 if a buffer is too small for its ranks."""
    return 0 if cell == "0" else count(cell)


def _stated(cell: str) -> int | None:
    """Read a count; return None if the source is not sure of it, such as "16?"."""
    return None if cell.endswith("?") else count(cell)


COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "op": _operation,
    "platform": word(),
    "nodes": _stated,
    "ranks": _stated,
    "size_bytes": _bytes,
    "time_us": measured,
    "note": str,
    "launch_us": measured,
}
"""The columns of a table of platforms, with a reader for their cells. Further columns are ignored."""

DEVICE_COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "op": _operation,
    "device": word(),
    "ranks": count,
    "size_bytes": count,
    "time_us": measured,
    "launch_us": measured,
}
"""The columns of a table of devices within one node."""

_OPTIONAL = frozenset(("nodes", "ranks", "time_us", "note", "launch_us"))
_DEVICE_OPTIONAL = frozenset(("launch_us",))


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One row of the table.

    Attributes:
        line: Line of the file.
        settings: Its cells without the measurements, as text.
        collective: Name of the collective.
        platform: The machine or the device, as the table names it.
        cluster: The machine, as a preset Cluster.
        nbytes: Bytes of the whole buffer, as nccl-tests counts.
        algorithm: The forced algorithm, as shoal.predict.cost.collectives.network names it; None for the
            library's choice.
        seconds: Measured seconds.
        launch: Seconds of a call that the host takes, 0 if it takes no part; None if the row does not say.
    """

    line: int
    settings: str
    collective: str
    platform: str
    cluster: Cluster
    nbytes: int
    algorithm: str | None
    seconds: float
    launch: float | None

    @property
    def quantity(self) -> str:
        """The collective, and whether its buffer is small."""
        return self.collective + (_SMALL if self.nbytes <= SMALL_BYTES else "")

    def predicted(self, by_algorithm: Mapping[str, float]) -> float:
        """Return the seconds of a call, from those of its algorithms on the links."""
        return max(self.launch or 0.0, by_algorithm.get(self.algorithm or "", min(by_algorithm.values())))


def read_collectives(path: str | Path, refuse: Refuse = strictly) -> list[MeasuredCollective]:
    """Read a table of timed collectives.

    Rows of platforms are skipped if their buffers are small, or if they do not say which ranks took part. But
    the largest of the small buffers of a node tells how long its host takes to launch a call.

    Args:
        path: Path of the file.
        refuse: Called with the errors of rows that cannot be used.

    Raises:
        DataError: The file is missing, lacks a column, or has a cell that cannot be read.
        ClusterError: A row names an unknown machine.
    """
    table = Table.open(path)
    if "device" in table.columns and "platform" not in table.columns:
        return list(table.read(DEVICE_COLUMNS, _DEVICE_OPTIONAL, _within_node, refuse))
    rows = [each for each in table.read(COLUMNS, _OPTIONAL, _measured, refuse) if each is not None]
    launches = {
        (each.platform, each.cluster.devices): each.seconds
        for each in sorted(rows, key=lambda row: row.nbytes)
        if each.nbytes < LEAST_BYTES and each.cluster.devices <= each.cluster.devices_per_node
    }
    return [
        replace(each, launch=launches.get((each.platform, each.cluster.devices), LAUNCH))
        if each.launch is None
        else each
        for each in rows
        if each.nbytes >= LEAST_BYTES
    ]


def over_all_collectives(comparisons: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Return comparisons of different collectives together, those of small buffers apart from the others."""
    found: dict[str, list[Comparison]] = {}
    for each in comparisons:
        name, _, small = each.quantity.partition(_SMALL[:4])
        if name in _COLLECTIVES:
            found.setdefault("all collectives" + (_SMALL if small else ""), []).append(each)
    return {name: members for name, members in found.items() if len({each.quantity for each in members}) > 1}


def _within_node(row: Row) -> MeasuredCollective:
    return MeasuredCollective(
        row.line,
        _settings(row),
        row["op"],
        row["device"],
        _node(row, row["device"], row["ranks"], 1),
        row["size_bytes"],
        None,
        row["time_us"] / 1e6,
        (row["launch_us"] or 0.0) / 1e6,
    )


def _settings(row: Row) -> str:
    cells = {name: value for name, value in row.values.items() if name not in ("time_us", "launch_us")}
    return ",".join(f"{name}={value}" for name, value in cells.items())


def _measured(row: Row) -> MeasuredCollective | None:
    if not (row["nodes"] and row["ranks"] and row["time_us"] and row["size_bytes"]):
        return None
    if row["ranks"] % row["nodes"]:
        row.refuse(
            f"has {row['ranks']} ranks on {row['nodes']} nodes", possible="the same number on every node"
        )
    return MeasuredCollective(
        row.line,
        _settings(row),
        row["op"],
        row["platform"],
        _cluster(row),
        row["size_bytes"],
        next((name for said, name in _ALGORITHMS.items() if re.search(said, row["note"] or "")), None),
        row["time_us"] / 1e6,
        None if row["launch_us"] is None else row["launch_us"] / 1e6,
    )


def _cluster(row: Row) -> Cluster:
    """Return the preset that the platform names, or one with the device that it names."""
    platform, ranks = row["platform"], row["ranks"]
    preset = matching("nodes", platform) or platform.lower().replace(" ", "-")
    if preset not in PRESETS:
        return _node(row, platform, ranks, row["nodes"])
    try:
        return Cluster.preset(preset, ranks)
    except ClusterError as error:
        raise row.located(error) from None


def _node(row: Row, device: str, ranks: int, nodes: int) -> Cluster:
    """Return the usual nodes with a device."""
    try:
        in_node = ranks // nodes if nodes > 1 else max(ranks, USUAL_NODE)
        return Cluster.assemble(device, ranks, in_node, None)
    except ClusterError as error:
        raise row.located(error) from None
