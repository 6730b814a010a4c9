"""The kind of schedules that `shoal.plan.schedules.search` finds for given times and memory."""

from __future__ import annotations

from shoal.plan.schedules.kind import Held, Kind

FOUND = "search"
"""The name of schedules that were found by search."""


def _held(rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None) -> tuple[Held, ...]:
    most = min(ranks * virtual if limit is None else limit, microbatches * virtual)
    return (Held((most / virtual,) * virtual, (0.0,) * virtual),)


SEARCHED = Kind(name=FOUND, row=None, held=_held, most_virtual=None, v_of=2, has_halves=True)
