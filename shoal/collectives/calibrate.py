"""Measures the cost of each algorithm on a group, and makes a table of the costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.collectives.table import Call, Table
from shoal.predict.cost import COLLECTIVES, find_algorithm, fit_alpha_beta

SIZES: tuple[int, ...] = tuple(1 << power for power in range(10, 27, 2))
"""Bytes of the buffers that are timed: 1 KiB to 64 MiB, each four times the one before."""


class TimedGroup(Protocol):
    """A process group that runs a given algorithm and says how long it took."""

    @property
    def level(self) -> str:
        """What carries the group's bytes: "shared-memory" or "network"."""
        ...

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def hosts(self) -> int:
        """Number of hosts, with equally many ranks on each."""
        ...

    @property
    def turns(self) -> int:
        """Number of ranks that share a core: 1 if each has a core of its own."""
        ...

    @property
    def aggregated(self) -> bool:
        """Whether an aggregator stands between the hosts."""
        ...

    def run(self, collective: str, algorithm: str, nbytes: int) -> float | None:
        """Return the median seconds of a call, equal on every rank.

        Args:
            collective: Name of the collective, such as "all_reduce".
            algorithm: Name of the algorithm, such as "ring".
            nbytes: S, as shoal.predict.cost.collectives.algorithms defines it for each collective.

        Returns:
            None if the algorithm does not take a buffer of that size.
        """
        ...


def calibrate(
    group: TimedGroup,
    table: Table,
    collectives: Sequence[str] = COLLECTIVES,
    sizes: Sequence[int] = SIZES,
) -> Table:
    """Time every algorithm that the group can run at every size, and fit the alpha and beta of each.

    Every rank of the group makes the same call. Two hosts say little about larger numbers, because many
    algorithms then have equal steps.

    Args:
        group: The group that is timed.
        table: The known algorithms, with the cost of each one's parts inside hosts.
        collectives: The collectives to time.
        sizes: Bytes of the buffers, at least two sizes.

    Returns:
        A table with the measured costs only.
    """
    entries = {}
    for collective in collectives:
        call = Call(
            collective,
            group.level,
            group.ranks,
            group.hosts,
            turns=group.turns,
            aggregated=group.aggregated,
        )
        for name in table.candidates(call):
            timed = {nbytes: group.run(collective, name, nbytes) for nbytes in sizes}
            times = {nbytes: seconds for nbytes, seconds in timed.items() if seconds is not None}
            if len(times) < 2:
                continue
            algorithm = find_algorithm(collective, name, group.level)
            steps = algorithm.steps(call.ranks, call.ranks_per_host)
            on_path = algorithm.bytes_on_path(call.ranks, call.turns, call.ranks_per_host)
            entries[collective, name, group.level] = fit_alpha_beta(
                steps=[steps] * len(times),
                nbytes=[on_path * each for each in times],
                seconds=list(times.values()),
                known=[steps * call.waiting + table.predict_inside(name, call, each) for each in times],
            )
    return Table(entries)
