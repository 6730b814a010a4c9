"""Seconds of a step where ranks outnumber the cores that they compute on.

Rates that were measured with all ranks busy are the rates of a share of a core. A rank that waits, as in a
pipeline, leaves its share to the others: with k of n ranks at work on c cores, each has c / k of a core
instead of c / n, and at most a whole core. All working ranks speed up by the same factor, so the order of
events does not change. A step that was simulated at the shared rate only needs a faster clock. It takes

    integral over the step of max(k, c) / n dt
"""

from __future__ import annotations

from collections.abc import Iterable


def crowded_seconds(seconds: float, busy: Iterable[tuple[float, float]], ranks: int, cores: int) -> float:
    """Rescale the seconds of a simulated step whose ranks outnumber the cores.

    Args:
        seconds: Seconds of the step, simulated at the rate that each rank has while all ranks work.
        busy: Intervals in which ranks work; those of one rank do not overlap.
        ranks: Number of ranks that share the cores.
        cores: Number of cores, fewer than ranks.
    """
    changes = sorted(change for start, stop in busy for change in ((start, 1), (stop, -1)))
    total = reached = 0.0
    working = 0
    for moment, change in (*changes, (seconds, 0)):
        total += (moment - reached) * max(working, cores) / ranks
        reached, working = moment, working + change
    return total
