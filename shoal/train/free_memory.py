"""`memory = "auto"`: the memory of this host that is free for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from shoal.cluster import Cluster, limited
from shoal.errors import ConfigError
from shoal.parallel.device_memory import available_memory
from shoal.train.config import TrainConfig

__all__ = ["AUTOMATIC_MEMORY", "PROCESS_BYTES", "within_memory"]

AUTOMATIC_MEMORY = "auto"
"""The word in a configuration that stands for what is free."""

PROCESS_BYTES = 320 << 20
"""Bytes of a rank's Python and libraries on a CPU, which are no tensors."""

_FREE_ON_GPUS = (
    "import torch; print(*(torch.cuda.mem_get_info(each)[0] for each in range(torch.cuda.device_count())))"
)


def within_memory(config: TrainConfig, cluster: Cluster, ranks: int) -> Cluster:
    """Return the Cluster whose devices have the memory that a configuration allows.

    With `memory = "auto"` it is what is free now, divided among the ranks of this host: on CPUs within the
    control group, less PROCESS_BYTES for each rank; on GPUs what the fullest GPU has left. Other hosts count
    as this one.

    Args:
        config: The configuration.
        cluster: The machines.
        ranks: Number of ranks.

    Raises:
        ConfigError: The limit cannot be read, or is "auto" and this system does not say what is free.
        ClusterError: It is less than contexts and libraries take.
    """
    if config.memory != AUTOMATIC_MEMORY:
        return limited(cluster, config.memory)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    free = _free_on_cpu(here) if cluster.cores or config.device == "cpu" else _free_on_gpus(here)
    if free is None or free <= 0:
        raise ConfigError(
            f"memory={AUTOMATIC_MEMORY} was given, and this host "
            + ("does not say how much memory is free" if free is None else "has no memory left for a rank"),
            possible="a size such as 20GiB",
            change="set memory to a size, or leave it out",
        )
    return cluster.with_each_device(lambda device: replace(device, memory=float(free)))


def _free_on_cpu(ranks: int) -> int | None:
    free = available_memory()
    return None if free is None else free // ranks - PROCESS_BYTES


def _free_on_gpus(ranks: int) -> int | None:
    """Return the bytes that each rank has on a GPU; another process asks, as the question makes contexts."""
    told = subprocess.run(
        [sys.executable, "-c", _FREE_ON_GPUS], capture_output=True, text=True, check=False
    ).stdout.split()
    return min(map(int, told)) // -(-ranks // len(told)) if told else None
