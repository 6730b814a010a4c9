"""Reads the matrix that `nvidia-smi topo -m` prints.

Rows and columns are devices (GPU0, ...) and network interfaces (NIC0, ... or mlx5_0, ...). An entry says what
lies between two: NV# so many NVLinks; PIX, PXB one PCIe switch or several; PHB a CPU's bridge; NODE several
bridges of one CPU; SYS another CPU. The matrix has no rates, and names no device; if the output of
`nvidia-smi -L`, or of `nvidia-smi`, stands in the same file, that names it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from shoal.cluster.tables import matching
from shoal.cluster.topology import Interface, Topology, components, device_key, equal_lanes, lanes_of
from shoal.errors import ClusterError

_WAYS = ("PIX", "PXB", "PHB", "NODE", "SOC", "SYS")
"""Ways from near to far, beside NV#; SOC is what old drivers call SYS."""
_NEAR = ("PIX", "PXB")
_DEVICE = re.compile(r"GPU\d+")
_NAMED = re.compile(r"^GPU \d[\d,]*: (.+?)(?: \(UUID.*)?$|^\|\s+\d+\s+(NVIDIA .+?)\s{2,}", re.MULTILINE)
_INTERFACE = re.compile(r"^\s*(NIC\d+): (\S+)\s*$", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def is_matrix(text: str) -> bool:
    """Return whether a text has the head of such a matrix."""
    return _head(_COLOURS.sub("", text)) is not None


def read_matrix(text: str, where: str, device: str | None = None) -> Topology:
    """Return the node of a matrix.

    Args:
        text: What `nvidia-smi topo -m` printed; other lines may stand around it.
        where: Name of the file, for messages.
        device: The device, by key or driver's name, which tells direct links from a switch's.

    Raises:
        ClusterError: The matrix is torn, has entries that are not known, or its devices' links differ.
    """
    text = _COLOURS.sub("", text)
    rows = _rows(text, where)
    names = [name for name in rows if _DEVICE.fullmatch(name)]
    count = len(names)
    key = device_key(device) if device else _told_device(text)
    counts = [[_lanes(rows[one][other]) for other in names] for one in names]
    is_mesh, lanes, groups = _links(counts, key)
    joined, each = equal_lanes(lanes, groups, where)
    notes = []
    if any(group != list(range(group[0], group[0] + joined)) for group in groups):
        notes.append(f"linked devices are not neighbours: order them as {groups}")
    return Topology(
        device=key,
        devices=count,
        joined=joined if each else 1,
        lanes=each,
        mesh=is_mesh,
        interfaces=_interfaces(rows, names, dict(_INTERFACE.findall(text))),
        notes=tuple(notes),
    )


def _head(text: str) -> list[str] | None:
    """Return the columns of the matrix; None if there is no head."""
    for line in text.splitlines():
        words = line.partition("CPU Affinity")[0].split()
        if words[:1] == ["GPU0"] and not any(word == "X" for word in words):
            return words
    return None


def _rows(text: str, where: str) -> dict[str, dict[str, str]]:
    """Return the entry of each row and column.

    Raises:
        ClusterError: A row is missing, short, or has an entry that is not known.
    """
    columns = _head(text) or []
    rows: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        words = line.split()
        if words[:1] and words[0] in columns and "X" in words[1 : len(columns) + 1]:
            rows[words[0]] = dict(zip(columns, words[1:], strict=False))
    whole = "the whole output of: nvidia-smi topo -m"
    for name in columns:
        entries = rows.get(name, {})
        if name not in rows or len(entries) < len(columns):
            raise ClusterError(
                f"{where} has {'a short' if entries else 'no'} row of {name}, though it has a column of it",
                possible=whole,
                change="import the output again, without wrapped or missing lines",
            )
        for other, entry in entries.items():
            is_known = entry in _WAYS or re.fullmatch(r"NV\d+", entry)
            if entry != "X" if name == other else not is_known:
                raise ClusterError(
                    f"{where} has {entry!r} between {name} and {other}",
                    possible="X for itself, else NV and a number, " + ", ".join(_WAYS),
                    change=f"import {whole}",
                )
    for name, other in itertools.combinations(columns, 2):
        if rows[name][other] != rows[other][name]:
            raise ClusterError(
                f"{where} has {rows[name][other]!r} between {name} and {other}, and {rows[other][name]!r} "
                f"between {other} and {name}",
                possible="the same both ways",
                change=f"import {whole}",
            )
    return rows


def _told_device(text: str) -> str:
    """Return the device that the same file names; "" if it names none, or several."""
    names = {one or other for one, other in _NAMED.findall(text)}
    return (matching("devices", names.pop()) or "") if len(names) == 1 else ""


def _lanes(entry: str) -> int:
    return int(entry[2:]) if entry.startswith("NV") else 0


def _links(counts: Sequence[Sequence[int]], key: str) -> tuple[bool, list[int], list[list[int]]]:
    """Return whether links lead from device to device, how many each device has, and the groups they join.

    Behind a switch each pair of devices has all links of both; in a mesh they share them. So all pairs that
    have together more links than a device can have are behind a switch; of an unknown device, 18.
    """
    count = len(counts)
    pairs = [(one, other) for one in range(count) for other in range(one) if counts[one][other]]
    most = (lanes_of(key) or {"most": 18})["most"] if key else 18
    sums = [sum(row) for row in counts]
    groups = components(count, pairs)
    if count > 2 and max(sums) > most:
        return False, [max(row) for row in counts], groups
    return True, sums, groups


def _interfaces(
    rows: Mapping[str, Mapping[str, str]], devices: Sequence[str], names: Mapping[str, str]
) -> tuple[Interface, ...]:
    """Return the interfaces behind the switches of devices; where there are none, the nearest ones."""
    nearest = {
        each: min(_WAYS.index(entry) for other, entry in row.items() if other in devices)
        for each, row in rows.items()
        if each not in devices
    }
    most = max(len(_NEAR) - 1, min(nearest.values(), default=0))
    return tuple(Interface(names.get(each, each)) for each, way in nearest.items() if way <= most)
