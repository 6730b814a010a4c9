"""The emulated networks of benchmarks/hosts.py: what has to cross their links, and the predicted times."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.collectives import Table, built_in_table
from shoal.collectives.table import Call
from shoal.machine.bench import COLLECTIVES
from shoal.testing.hosts import Hosts


@dataclass(frozen=True, slots=True)
class Network:
    """What is emulated: `hosts` with `ranks_per_host` each, on links of `rate` bits a second."""

    hosts: int
    ranks_per_host: int
    rate: float

    @classmethod
    def parse(cls, text: str) -> Network:
        """From a text such as "2x4@10": hosts, ranks on each, Gbit/s."""
        hosts, _, rest = text.partition("x")
        ranks, _, rate = rest.partition("@")
        return cls(int(hosts), int(ranks), float(rate) * 1e9)

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts of {self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)}"
        return f"{hosts}, {self.rate / 1e9:g} Gbit/s"

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_per_host

    def bytes_across(self, collective: str, size: int, *, is_aggregated: bool = False) -> float:
        """What at least has to cross the busiest link one way, in bytes.

        All of the buffer, if an aggregator adds up. Otherwise, with hosts in the place of ranks, it is what
        the bus factor says, where ranks of a host can share what has come, and combine what is to go. In an
        all-to-all each rank's data is its own.
        """
        if is_aggregated:
            return size
        if collective == "all_to_all":
            return size * self.ranks_per_host * (self.ranks - self.ranks_per_host) / self.ranks
        return size * COLLECTIVES[collective].bus_factor(self.hosts)

    def predicted_seconds(self, collective: str, size: int, name: str) -> float:
        """By the table of algorithms, whose network has 1e9 bytes/s, at this network's rate."""
        rate = Hosts.payload_rate(self.rate)
        entries = {
            key: cost._replace(beta=cost.beta * 1e9 / rate) if key[2] == "network" else cost
            for key, cost in built_in_table().entries.items()
        }
        table, call = Table(entries), Call(collective, "network", self.ranks, self.hosts)
        algorithm = name.removeprefix("shoal").strip() or built_in_table().choices(call).choose(size)
        return table.predict("ring" if name == "gloo" else algorithm, call, size)
