"""The machines: devices, links, and what programs reach of them. Imports no torch.

`Cluster` is made of a `Device`, of `Level`s of links and of a `Host`; known ones are in devices.toml and
cards.toml, links.toml, hosts.toml, nodes.toml and card_nodes.toml beside this. The cost model, the planner
and the probe call it.
"""

from shoal.cluster.cluster import PRESETS, Cluster
from shoal.cluster.device import Device, peak_flops
from shoal.cluster.host import Host
from shoal.cluster.level import Level

__all__ = ["PRESETS", "Cluster", "Device", "Host", "Level", "peak_flops"]
