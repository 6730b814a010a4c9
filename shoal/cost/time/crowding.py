"""Seconds of a step where ranks outnumber the cores that they compute on.

Rates that were measured with all ranks busy are those of a share of a core. A rank that waits, as a pipeline
makes it, lends its share to the others: with k of n ranks at work on c cores, each has c / k of a core
instead of c / n, and at most a whole one. All that are at work are quicker by the same factor, so what comes
after what stays as it was, and a step that was played at the shared rate only has to be looked at by a
quicker clock:

    integral over the step of max(k, c) / n dt
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["crowded_seconds"]


def crowded_seconds(seconds: float, busy: Iterable[tuple[float, float]], ranks: int, cores: int) -> float:
    """Seconds of what was played at the rate of ranks that all work.

    Args:
        seconds: That it was played for.
        busy: When ranks were at work: intervals of each, of one rank disjoint.
        ranks: That share the cores.
        cores: Fewer than ranks.
    """
    changes = sorted(change for start, stop in busy for change in ((start, 1), (stop, -1)))
    total = reached = 0.0
    working = 0
    for moment, change in (*changes, (seconds, 0)):
        total += (moment - reached) * max(working, cores) / ranks
        reached, working = moment, working + change
    return total
