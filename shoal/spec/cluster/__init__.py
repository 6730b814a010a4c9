"""The machines: devices, links, and the rates that programs reach on them. Imports no torch.

A `Cluster` has a `Device` (or `Part`s with several), `Level`s of links, a `Host`, `Prices` and `Power`, and
says by what it was `Calibrated`.
Known ones are in devices.toml, cards.toml, links.toml, hosts.toml, power.toml, nodes.toml and card_nodes.toml
in this directory. The cost model, the planner and the probe call this package.
"""

from shoal.spec.cluster.cluster import (
    PRESETS,
    Cluster,
    counts_of,
    devices_of,
    every_device,
    limited,
    peak_of_all,
)
from shoal.spec.cluster.device import Device, Part, known_device, peak_flops
from shoal.spec.cluster.level import Level
from shoal.spec.cluster.money import dollars, kilowatt_hours, price_of, priced
from shoal.spec.cluster.prices import KINDS_OF_PRICE, Calibrated, Host, Power, Prices

__all__ = [
    "KINDS_OF_PRICE",
    "PRESETS",
    "Calibrated",
    "Cluster",
    "Device",
    "Host",
    "Level",
    "Part",
    "Power",
    "Prices",
    "counts_of",
    "devices_of",
    "dollars",
    "every_device",
    "kilowatt_hours",
    "known_device",
    "limited",
    "peak_flops",
    "peak_of_all",
    "price_of",
    "priced",
]
