"""The data files of this package: known devices, links, hosts and nodes, from which Clusters are made.

`nodes.toml` names a device of `devices.toml` and, level by level, a link of `links.toml`; a node's own values
for a level override those of the link. `cards.toml` has further devices, and `card_nodes.toml` the nodes for
them. A table that is `like` another takes the values that it lacks from that table.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, get_type_hints

from shoal.errors import ClusterError, nearest

_FILES = {"devices": ("cards", "devices"), "nodes": ("nodes", "card_nodes")}
"""Data files, for kinds that have several, in the order in which names are looked up."""


@cache
def table(name: str) -> dict[str, dict[str, Any]]:
    """Return the complete tables of devices, links, hosts, power or nodes. Do not change them."""
    written: dict[str, dict[str, Any]] = {}
    for file in _FILES.get(name, (name,)):
        written |= tomllib.loads(
            resources.files("shoal.spec.cluster").joinpath(f"{file}.toml").read_text("utf-8")
        )
    return {key: _completed(entry, written) for key, entry in written.items()}


def matching(name: str, words: str) -> str | None:
    """Return the first table of a data file whose `match` is found in a driver's or publication's name."""
    for key, entry in table(name).items():
        if "match" in entry and re.search(entry["match"], words, re.IGNORECASE):
            return key
    return None


def described(preset: str) -> dict[str, Any]:
    """Return the description of a preset, in the form of a file: one node, with its device and levels.

    Raises:
        ClusterError: There is no such preset.
    """
    nodes = table("nodes")
    if preset not in nodes:
        raise ClusterError(
            f"{preset!r} is not a preset of machines{nearest(preset, nodes)}",
            possible=", ".join(nodes) + "; or a path to a .toml file",
            change="use one of these names",
        )
    node = nodes[preset]
    device = {key: value for key, value in table("devices")[node["device"]].items() if key != "match"}
    levels: list[dict[str, Any]] = []
    for level in node["levels"]:
        link = table("links")[level["link"]]
        own = {key: value for key, value in level.items() if key != "link"}
        inner = levels[-1]["devices"] if levels else 1
        levels.append({"devices": inner, **link, **own})
    said = {key: value for key, value in node.items() if key not in ("match", "board")}
    around = {"host": _host_of(node), "power": _power_of(node)}
    return {"name": preset, **said, "device": device, "levels": levels, **around}


def _completed(entry: Mapping[str, Any], written: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table with missing values from the table that it is `like`; `match` is not inherited."""
    if "like" not in entry:
        return dict(entry)
    relative = _completed(written[entry["like"]], written)
    relative.pop("match", None)
    return {**relative, **{key: value for key, value in entry.items() if key != "like"}}


def _host_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the host that a node names, or that nodes with its device have; empty if none is known."""
    for name, host in table("hosts").items():
        if name == node.get("host") or ("host" not in node and node["device"] in host["of"]):
            return {key: value for key, value in host.items() if key != "of"}
    return {}


def _power_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the power of a node's devices; empty if it is not known."""
    for power in table("power").values():
        if node["device"] in power["of"]:
            return {key: value for key, value in power.items() if key != "of"}
    return {}


_LEAST_BYTES = 1e6  # no memory, link or peak is below this; a smaller figure was meant in giga-units


def require(holds: bool, where: str, name: str, value: object, possible: str) -> None:
    """Raise ClusterError unless a condition on a figure holds.

    Args:
        holds: The condition.
        where: The object that has the figure, such as "the device x".
        name: Name of the figure.
        value: Value of the figure.
        possible: The values that are allowed, in words.
    """
    if not holds:
        raise ClusterError(f"{where} has {name}={value}", possible=possible, change=f"correct {name}")


def require_bytes(where: str, **figures: float) -> None:
    """Raise ClusterError for figures in bytes, bytes/s or FLOP/s that must be in another unit."""
    for name, value in figures.items():
        require(value > 0, where, name, value, "a positive number")
        require(
            value >= _LEAST_BYTES,
            where,
            name,
            value,
            f"bytes, bytes/s or FLOP/s, at least {_LEAST_BYTES:g}; {value} looks like giga- or tera-units: "
            f"write {value} GB as {value}e9",
        )


def require_share(where: str, name: str, value: float) -> None:
    """Raise ClusterError unless a share of a data sheet's figure is above 0 and at most 1."""
    require(
        0 < value <= 1,
        where,
        name,
        value,
        "a share of the data sheet's value, above 0 and at most 1 (if it is more, the data sheet is wrong)",
    )


SHARE = "share, 0 to 1"
DOLLARS = "dollars for a device and hour"
PER_HOUR = "for a device and hour"


class Key(NamedTuple):
    """How the value of a field is written, as `Annotated[float, Key("bytes/s", "55e9")]` says.

    Attributes:
        unit: Unit of the value, or what kind of thing it is.
        example: A value in TOML.
    """

    unit: str
    example: str


@cache
def keys_of(kind: type) -> Mapping[str, Key]:
    """Return how each field of a class is written, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}
