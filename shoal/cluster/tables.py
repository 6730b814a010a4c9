"""The data files of this package: devices, links, hosts and nodes that are known; how they make a Cluster.

`nodes.toml` names a device of `devices.toml` and, level by level, a link of `links.toml`; what a node says of
a level besides goes before what its link says.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from shoal.errors import ClusterError, nearest

__all__ = ["described", "matching", "table"]


@cache
def table(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a data file of this package: devices, links, hosts or nodes. Not to be changed."""
    return tomllib.loads(resources.files("shoal.cluster").joinpath(f"{name}.toml").read_text("utf-8"))


def matching(name: str, words: str) -> str | None:
    """The first table of a data file whose `match` is found in what a driver or a publication calls it."""
    for key, entry in table(name).items():
        if "match" in entry and re.search(entry["match"], words, re.IGNORECASE):
            return key
    return None


def described(preset: str) -> dict[str, Any]:
    """A node of the table as a file would describe it: one node, with its device and levels written out.

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
    said = {key: value for key, value in node.items() if key != "match"}
    return {"name": preset, **said, "device": device, "levels": levels, "host": _host_of(node)}


def _host_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """The host that a node names, or that nodes with its device have; nothing where none is known."""
    for name, host in table("hosts").items():
        if name == node.get("host") or ("host" not in node and node["device"] in host["of"]):
            return {key: value for key, value in host.items() if key != "of"}
    return {}
