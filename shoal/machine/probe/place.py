"""The ranks of a probe: their hosts and their devices.

Time operations while all ranks do the same, since cores and the memory's bandwidth are shared.

A machine's drift should affect all operations alike: in every round each operation has its turn, every other
round in reverse order. A turn has as many operations as fill some milliseconds on the slowest rank, after one
that is not counted. The ranks begin it together and do equally many. If ranks share cores, a rank that may
work first is soon done: there a turn ends with the last rank's end.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from typing import Any, TypeVar

import torch
import torch._dynamo

from shoal.collectives.rendezvous import host_identity
from shoal.collectives.values import all_gather_value
from shoal.errors import ClusterError
from shoal.machine.bench.settings import Ranks


@dataclass(frozen=True, slots=True)
class Place:
    """The ranks, host by host.

    Attributes:
        ranks: This rank, among all.
        hosts: By host, its ranks in ascending order.
        device: Device on which this rank computes.
        backend: Backend of the process groups that are measured.
    """

    ranks: Ranks
    hosts: tuple[tuple[int, ...], ...]
    device: torch.device
    backend: str

    @classmethod
    def find(cls, ranks: Ranks, backend: str) -> Place:
        """Return the place of the ranks; every rank of the default group calls this.

        Raises:
            ClusterError: Hosts have unequal numbers of ranks, or their ranks do not follow one another.
        """
        identities = all_gather_value(host_identity(os.environ))
        hosts = tuple(
            tuple(rank for rank, other in enumerate(identities) if other == identity)
            for identity in dict.fromkeys(identities)
        )
        _require_even(hosts)
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", ranks.local_rank)
            torch.cuda.set_device(device)
        return cls(ranks, hosts, device, backend)

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host, which is equal on all hosts."""
        return len(self.hosts[0])

    @property
    def cores(self) -> int:
        """Number of cores that the ranks of this host may use."""
        return len(os.sched_getaffinity(0))

    @property
    def is_crowded(self) -> bool:
        """Whether ranks share cores."""
        return self.device.type == "cpu" and self.ranks_per_host * torch.get_num_threads() > self.cores

    @property
    def device_name(self) -> str:
        """Name of the device, as the driver gives it."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"{platform.machine()}, {threads} {'thread' if threads == 1 else 'threads'}"

    @property
    def memory(self) -> float:
        """Bytes of one device; ranks on cores share their host's."""
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / self.ranks_per_host

    def finish(self) -> None:
        """Wait until the device has completed all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gathered(self, value: Any) -> list[Any]:
        """Return the values that all ranks give, by rank."""
        return all_gather_value(value)


def _require_even(hosts: Sequence[Sequence[int]]) -> None:
    together = [rank for host in hosts for rank in host]
    if len({len(host) for host in hosts}) > 1 or together != sorted(together):
        raise ClusterError(
            f"the hosts have {', '.join(map(str, map(len, hosts)))} ranks, in the order "
            f"{', '.join(map(str, together))}",
            possible="the same number of ranks on every host, numbered host by host",
            change="start them with torchrun --nproc-per-node=N on every host",
        )


COLD = 128 << 20
"""Bytes that lie between two uses of a tensor: several times the caches of a core."""

Operation = Callable[[], object]

Key = TypeVar("Key", bound=Hashable)

_MOST = 2000  # operations in a turn


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring.

    Attributes:
        rounds: Turns of each operation.
        turn_seconds: Least seconds of a turn.
        sizes: Bytes of the collectives' buffers.
    """

    rounds: int
    turn_seconds: float
    sizes: tuple[int, ...]


THOROUGH = Effort(5, 0.02, tuple(1 << power for power in range(10, 27, 2)))
"""Collectives of 1 KiB to 64 MiB, each size four times the one before."""

QUICK = Effort(3, 0.005, (4 << 10, 64 << 10, 1 << 20, 8 << 20))


def time_in_turns(operations: Mapping[Key, Operation], place: Place, effort: Effort) -> dict[Key, float]:
    """Return the seconds of each operation on this rank, the median over rounds.

    Args:
        operations: Operations by key; equal keys in equal order on all ranks.
        place: The ranks.
        effort: Number and length of the turns.
    """
    counts = {key: _count(operation, place, effort) for key, operation in operations.items()}
    seconds: dict[Key, list[float]] = {key: [] for key in operations}
    for index in range(effort.rounds):
        for key in reversed(list(operations)) if index % 2 else operations:
            seconds[key].append(_turn(operations[key], counts[key], place))
    return {key: median(turns) for key, turns in seconds.items()}


def _count(operation: Operation, place: Place, effort: Effort) -> int:
    """Return the number of operations in a turn."""
    once = place.ranks.largest(_turn(operation, 1, place))
    return min(max(1, round(effort.turn_seconds / once)), _MOST)


def _turn(operation: Operation, count: int, place: Place) -> float:
    operation()
    place.finish()
    place.ranks.start_together()
    start = time.perf_counter()
    for _ in repeat(None, count):
        operation()
    place.finish()
    seconds = time.perf_counter() - start
    return (place.ranks.largest(seconds) if place.is_crowded else seconds) / count
