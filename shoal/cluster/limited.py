"""A Cluster whose devices give training less than their memory."""

from __future__ import annotations

from dataclasses import replace

from shoal.cluster.cluster import Cluster
from shoal.errors import ConfigError
from shoal.units import parse_bytes


def limited(cluster: Cluster, memory: str) -> Cluster:
    """Return the Cluster whose devices have no more memory than was asked for.

    Args:
        cluster: The machines.
        memory: A size such as 20GiB; "" for all that there is.

    Raises:
        ConfigError: The size cannot be read.
        ClusterError: It is less than what contexts and libraries take on every device.
    """
    if not memory:
        return cluster
    try:
        size = parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(
            f"the memory {memory} cannot be read: {error}",
            possible="a size such as 512MiB or 20GiB",
            change="write, for example, 20GiB",
        ) from error
    return cluster.with_each_device(lambda device: replace(device, memory=min(device.memory, size)))
