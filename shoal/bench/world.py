"""The ranks of a bench: how they join, and how they exchange figures between measurements.

They join a default group of gloo, which every torch has. It carries nothing that is measured: it starts the
ranks of a measurement together and finds the slowest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.collectives.meeting_point import open_store

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank and the number of ranks.

    Attributes:
        rank: This process's rank.
        count: Number of ranks.
        local_rank: This process's number on its host.
    """

    rank: int
    count: int
    local_rank: int

    def start_together(self) -> None:
        """Wait until all ranks are here; they return within about a millisecond of one another."""
        dist.barrier()

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        return _combined(value, dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        """Return the sum of the ranks' values."""
        return _combined(value, dist.ReduceOp.SUM)


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Form the default group of all ranks for this context; they meet at MASTER_ADDR and MASTER_PORT."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = open_store(master, ranks.rank, ranks.count, _TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.count, timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _combined(value: float, op: dist.ReduceOp.RedOpType) -> float:
    combined = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(combined, op)
    return combined.item()
