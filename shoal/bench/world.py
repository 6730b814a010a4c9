"""The ranks of a bench: how they meet, and how they agree on figures between measurements.

They meet in a default group of gloo, which every torch has, and which carries nothing that is measured: it
starts the ranks of a measurement together and finds the slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Ranks", "joined"]

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among all of them.

    Attributes:
        rank: Of this process.
        count: How many there are.
        local_rank: Of this process among those of its host.
    """

    rank: int
    count: int
    local_rank: int

    def start_together(self) -> None:
        """Returns when all ranks are here; they leave within about a millisecond of one another."""
        dist.barrier()

    def largest(self, value: float) -> float:
        """The largest of the values that the ranks give."""
        return _combined(value, dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        """The sum of the values that the ranks give."""
        return _combined(value, dist.ReduceOp.SUM)


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Within it, the default group of all ranks exists; they meet where MASTER_ADDR and MASTER_PORT say."""
    dist.init_process_group("gloo", rank=ranks.rank, world_size=ranks.count, timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _combined(value: float, op: dist.ReduceOp.RedOpType) -> float:
    combined = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(combined, op)
    return combined.item()
