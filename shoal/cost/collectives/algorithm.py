"""One way to do a collective, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Algorithm", "AlphaBeta"]


class AlphaBeta(NamedTuple):
    """What a step and a byte cost.

    Attributes:
        alpha: Seconds per step.
        beta: Seconds per byte on the path.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective on one level, as counts for n peers that have an interface each.

    Attributes:
        collective: What it does, such as "all_reduce".
        name: As users write it in options, such as "halving-doubling".
        level: "shared-memory" or "network".
        steps_of: Messages that wait for one another.
        path_of: Bytes on the path, over S, the bytes of the whole buffer.
        sent_of: Bytes that the busiest peer sends, or in shared memory reads from others, over S.
        crowds: Whether all ranks of a host send to other hosts at once.
        forwards_sums: Whether ranks pass on partial sums. Those of 16-bit floats travel as 32-bit ones.
        inside: What it starts and ends with inside each host, as (collective, algorithm) in shared memory.
            Its peers are then hosts, and each rank of a host carries an equal part of the bytes to others.
    """

    collective: str
    name: str
    level: str
    steps_of: Callable[[int], int]
    path_of: Callable[[int], float]
    sent_of: Callable[[int], float]
    crowds: bool = False
    forwards_sums: bool = False
    inside: tuple[tuple[str, str], ...] = ()

    def steps(self, ranks: int, ranks_per_host: int = 1) -> int:
        """Messages that wait for one another.

        Args:
            ranks: Of the group.
            ranks_per_host: How many of them share a network interface; 1 in shared memory.
        """
        return self.steps_of(self._peers(ranks, ranks_per_host))

    def bytes_on_path(self, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Bytes that go one after another through the busiest interface, or the busiest rank's memory.

        Args:
            ranks: Of the group.
            nbytes: S, as shoal.cost.collectives.algorithms defines it for each collective.
            ranks_per_host: How many ranks share a network interface; 1 in shared memory.
        """
        alone = self.path_of(self._peers(ranks, ranks_per_host)) * nbytes
        if self.crowds and ranks > 1:
            return alone * ranks_per_host * (ranks - ranks_per_host) / (ranks - 1)
        return alone

    def bytes_sent(self, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Bytes that the busiest rank sends, or in shared memory reads from others; arguments as above."""
        sent = self.sent_of(self._peers(ranks, ranks_per_host)) * nbytes
        return sent / ranks_per_host if self.inside else sent

    def time(self, cost: AlphaBeta, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Seconds, without those of `inside`; arguments as above."""
        path = self.bytes_on_path(ranks, nbytes, ranks_per_host)
        return cost.alpha * self.steps(ranks, ranks_per_host) + cost.beta * path

    def _peers(self, ranks: int, ranks_per_host: int) -> int:
        return ranks // ranks_per_host if self.inside else ranks
