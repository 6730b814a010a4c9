"""The cost of half and twice the micro-batch, and of half and twice the buckets, with all else unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.errors import PlanError
from shoal.plan import SettledPlan
from shoal.planner.candidate import Candidate
from shoal.planner.search import Search

__all__ = ["Size", "half_and_twice", "sizes_of"]


@dataclass(frozen=True, slots=True)
class Size:
    """A Plan with one size changed.

    Attributes:
        setting: "microbatch" or "bucket".
        plan: The Plan.
        slower: Its step's time relative to the chosen one's, minus 1; both in closed form.
        memory: Bytes of the rank that holds most.
        fits: Whether this memory fits.
    """

    setting: str
    plan: SettledPlan
    slower: float
    memory: float
    fits: bool


def sizes_of(search: Search, winner: Candidate) -> Iterator[Size]:
    """Yield half and twice each size, if that is a legal Plan.

    Args:
        search: The search that found the winner.
        winner: The Plan whose sizes change.
    """
    exchanges = winner.plan.dp * winner.plan.cp > 1 and not winner.plan.sharding.cuts_weights
    chosen = search.cost(winner.plan).seconds
    for setting in ("microbatch", *(["bucket"] if exchanges else [])):
        value = getattr(winner.plan, setting)
        for other in half_and_twice(value):
            plan = _changed(winner, {setting: other})
            if plan is not None:
                memory = search.shared.memories.fullest(plan, winner.batch).peak
                slower = search.cost(plan).seconds / chosen - 1
                yield Size(setting, plan, slower, memory, memory <= search.room)


def half_and_twice(value: int) -> list[int]:
    """Return a degree or size, halved if that is whole, and doubled."""
    return [*([value // 2] if value % 2 == 0 else []), 2 * value]


def _changed(winner: Candidate, change: dict[str, Any]) -> SettledPlan | None:
    """Return the Plan with one setting changed; None if it is not legal."""
    try:
        return SettledPlan.of(winner.plan.replace(**change), winner.batch)
    except PlanError:
        return None
