"""The ranks of a probe: their hosts and their devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# If an optimizer imports it while a gloo group exists, the process may abort at its exit: see
# shoal/parallel/communication.py.
import torch._dynamo

from shoal.bench.world import Ranks
from shoal.collectives.rendezvous import host_identity
from shoal.collectives.values import all_gather_value
from shoal.errors import ClusterError


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
