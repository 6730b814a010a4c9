"""The machines: devices, links, and the rates that programs reach on them. Imports no torch.

A `Cluster` has a `Device`, `Level`s of links and a `Host`. Known ones are in devices.toml, cards.toml,
links.toml, hosts.toml, nodes.toml and card_nodes.toml in this directory. The cost model, the planner and the
probe call this package.
"""

from shoal.cluster.cluster import PRESETS, Cluster
from shoal.cluster.device import Device, known_device, peak_flops
from shoal.cluster.host import Host
from shoal.cluster.level import Level

__all__ = ["PRESETS", "Cluster", "Device", "Host", "Level", "known_device", "peak_flops"]
