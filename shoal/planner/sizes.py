"""The cost of half and twice the micro-batch, and of half and twice the buckets, with all else unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.plan import SettledPlan
from shoal.planner.candidate import Candidate
from shoal.planner.neighbours import changed, half_and_twice
from shoal.planner.proportion import proportional
from shoal.planner.search import Search


@dataclass(frozen=True, slots=True)
class Size:
    """A Plan with one size changed.

    Attributes:
        setting: "microbatch" or "bucket".
        plan: The Plan.
        slower: Its played step's time relative to the chosen one's, minus 1.
        memory: Bytes of the rank that holds most.
        room: Bytes of its device that a Plan may fill.
        fits: Whether this memory fits.
    """

    setting: str
    plan: SettledPlan
    slower: float
    memory: float
    room: float
    fits: bool


def sizes_of(search: Search, winner: Candidate) -> Iterator[Size]:
    """Yield half and twice each size, if that is a legal Plan.

    Args:
        search: The search that found the winner.
        winner: The Plan whose sizes change.
    """
    exchanges = winner.plan.dp * winner.plan.cp > 1 and not winner.plan.sharding.cuts_weights
    for setting in ("microbatch", *(["bucket"] if exchanges else [])):
        value = getattr(winner.plan, setting)
        for other in half_and_twice(value):
            plan = changed(winner.plan, winner.batch, **{setting: other})
            if plan is not None and winner.plan.shared is not None and plan.shared is None:
                plan = proportional(search, plan) or plan
            if plan is not None:
                memory = search.shared.fullest(plan)
                slower = search.shared.played(plan) / winner.seconds - 1
                room = search.room / memory.tightness
                yield Size(setting, plan, slower, memory.peak, room, memory.required <= search.room)
