"""The tables of docs/concepts/cost-model.md: constants of devices and links, and what many ranks bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.predict.cost.outlook import goodput
from shoal.predict.cost.time import lognormal_maximum, normal_maximum
from shoal.spec.cluster import Cluster, Device, Level
from shoal.units import format_seconds

__all__ = ["device_rows", "goodput_rows", "link_rows", "slowest_rows"]

_DEVICES = ("a100-80", "h100", "b200", "mi300x")
_NODES = ("dgx-a100", "dgx-h100", "dgx-b200")
_NOT_CONSTANTS = ("name", "source")
_RANKS = (8, 64, 512, 4096, 32768)
_STEP, _SAVE, _RESTART = 10.0, 30.0, 300.0
_FAILING = "dgx-h100"


def device_rows(meanings: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """By constant, its meaning and some devices' values."""
    devices = [Device.preset(name) for name in _DEVICES]
    return ["constant", "what it is", *(f"`{name}`" for name in _DEVICES)], [
        [f"`{name}`", meaning, *(_text(getattr(device, name)) for device in devices)]
        for name, meaning in meanings.items()
        if name not in _NOT_CONSTANTS
    ]


def link_rows(meanings: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """By constant, its meaning and its values of some nodes' links, inside and between."""
    levels: dict[str, Level] = {}
    for node in _NODES:
        inside, outside = Cluster.preset(node).levels
        levels |= {f"`{node}` inside": inside, f"`{node}` between": outside}
    return ["constant", "what it is", *levels], [
        [f"`{name}`", meaning, *(_text(getattr(level, name)) for level in levels.values())]
        for name, meaning in meanings.items()
        if name not in (*_NOT_CONSTANTS, "devices")
    ]


def slowest_rows() -> tuple[list[str], list[list[str]]]:
    """By ranks, how much longer all take than one does on average."""
    return ["ranks", "times normal, 2 %", "lognormal, 2 %", "normal, 10 %", "lognormal, 10 %"], [
        [
            f"{ranks:,}",
            *(
                f"{maximum(ranks, variation) - 1:+.1%}"
                for variation in (0.02, 0.1)
                for maximum in (normal_maximum, lognormal_maximum)
            ),
        ]
        for ranks in _RANKS
    ]


def goodput_rows() -> tuple[list[str], list[list[str]]]:
    """By devices, what failures leave."""
    rows = []
    for devices in _RANKS:
        found = goodput(Cluster.preset(_FAILING, devices), _STEP, _SAVE, _RESTART)
        rows.append(
            [
                f"{devices:,}",
                format_seconds(found.between_failures),
                format_seconds(found.interval * found.step),
                *(f"{each:.1%}" for each in (found.saving, found.restarting, found.lost, found.share)),
            ]
        )
    head = ["devices", "from failure to failure", "from checkpoint to checkpoint"]
    return [*head, "saving", "restarting", "lost", "goodput"], rows


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each:.4g}" for name, each in value.items())
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}"
