"""`memory = "auto"`: the memory of this host that is free for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

from shoal.cluster import Cluster, limited
from shoal.errors import ConfigError
from shoal.parallel.device_memory import available_memory
from shoal.signals import withheld_from_children
from shoal.train.config import TrainConfig

AUTOMATIC_MEMORY = "auto"
"""The word in a configuration that stands for what is free."""

PROCESS_BYTES = 320 << 20
"""Bytes of a rank's Python and libraries on a CPU, which are no tensors."""

_FREE_ON_GPUS = """
import sys, torch
print(*(torch.cuda.mem_get_info(each)[0] for each in range(torch.cuda.device_count())), flush=True)
sys.stdin.read()
"""
"""Prints the bytes of each GPU that are free while it has a context there, and ends with its input."""


def within_memory(config: TrainConfig, cluster: Cluster, ranks: int) -> Cluster:
    """Return the Cluster whose devices have the memory that a configuration allows.

    With `memory = "auto"` it is what is free now, divided among the ranks of this host: on CPUs within the
    control group, less PROCESS_BYTES for each rank; on GPUs what the fullest GPU has left, less what a
    context takes for each rank beyond what the Cluster reserves for it. Other hosts count as this one.

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
    if cluster.cores or config.device == "cpu":
        free = _free_on_cpu(here)
    else:
        free = _free_on_gpus(here, int(cluster.reserved))
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


def _free_on_gpus(ranks: int, reserved: int) -> int | None:
    """Return the bytes that each rank has on a GPU, with those that the Cluster reserves for its context.

    Other processes ask, because the question makes a context on each GPU. While the second one asks there are
    two contexts, and while the first one asks there is one: the difference is the size of a context.
    """
    with _asking() as first:
        with_one = _answer_of(first)
        with _asking() as second:
            with_two = _answer_of(second)
    if not with_one or len(with_one) != len(with_two):
        return None
    sharing = -(-ranks // len(with_one))
    return min(map(partial(_of_a_rank, sharing, reserved), with_one, with_two))


def _asking() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FREE_ON_GPUS]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with withheld_from_children():
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True)


def _answer_of(asked: subprocess.Popen[str]) -> list[int]:
    assert asked.stdout is not None
    return [int(each) for each in asked.stdout.readline().split()]


def _of_a_rank(sharing: int, reserved: int, with_one: int, with_two: int) -> int:
    """Return the bytes of each rank on a GPU, from what is free there with one context and with two."""
    context = max(0, with_one - with_two)
    return (with_one + context) // sharing - max(0, context - reserved)
