"""One way to do a collective, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class AlphaBeta(NamedTuple):
    """Seconds per step and per byte.

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
        collective: The collective that it does, such as "all_reduce".
        name: The name that users write in options, such as "halving-doubling".
        level: "shared-memory" or "network".
        steps_of: Function of n: messages that wait for one another.
        path_of: Function of n: bytes on the path, divided by S, the bytes of the whole buffer.
        sent_of: Function of n: bytes that the busiest peer sends, divided by S. In shared memory, bytes that
            it reads from others.
        crowds: Whether all ranks of a host send to other hosts at once.
        forwards_sums: Whether ranks pass on partial sums. Partial sums of 16-bit floats travel as 32-bit
            floats.
        inside: Collectives inside each host, before and after, as (collective, algorithm) in shared memory.
            The peers are then hosts, and each rank of a host carries an equal part of the bytes to others.
        aggregated: Whether it needs an aggregator between the hosts.
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
    aggregated: bool = False

    def steps(self, ranks: int, ranks_per_host: int = 1) -> int:
        """Return the number of messages that wait for one another.

        Args:
            ranks: Number of ranks in the group.
            ranks_per_host: Number of ranks that share a network interface; 1 in shared memory.
        """
        return self.steps_of(self._peers(ranks, ranks_per_host))

    def bytes_on_path(self, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Return the bytes that pass one after another the busiest interface, or the busiest rank's memory.

        Args:
            ranks: Number of ranks in the group.
            nbytes: S, as shoal.cost.collectives.algorithms defines it for each collective.
            ranks_per_host: Number of ranks that share a network interface; 1 in shared memory.
        """
        alone = self.path_of(self._peers(ranks, ranks_per_host)) * nbytes
        if self.crowds and ranks > 1:
            return alone * ranks_per_host * (ranks - ranks_per_host) / (ranks - 1)
        return alone

    def bytes_sent(self, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Return the bytes that the busiest rank sends, or in shared memory reads from others.

        The arguments are those of `bytes_on_path`.
        """
        sent = self.sent_of(self._peers(ranks, ranks_per_host)) * nbytes
        return sent / ranks_per_host if self.inside else sent

    def time(self, cost: AlphaBeta, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Return the seconds without those of `inside`; the arguments are those of `bytes_on_path`."""
        path = self.bytes_on_path(ranks, nbytes, ranks_per_host)
        return cost.alpha * self.steps(ranks, ranks_per_host) + cost.beta * path

    def _peers(self, ranks: int, ranks_per_host: int) -> int:
        return -(-ranks // ranks_per_host) if self.inside else ranks
