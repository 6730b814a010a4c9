"""The choice: Plans of a Workload on a Cluster, best first by time or by money, or the reason for none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cluster import Cluster, devices_of
from shoal.errors import ClusterError, ConfigError, PlanError
from shoal.plan import CHOICES
from shoal.planner.candidate import Candidate
from shoal.planner.cheapest_blocks import with_cheapest_blocks
from shoal.planner.explain import explain
from shoal.planner.explanation import Explanation
from shoal.planner.money import cheapest
from shoal.planner.offloaded import quicker_outside, stores_activations
from shoal.planner.polish import LEAST_GAIN, polished, simplest, with_found_schedule
from shoal.planner.proportion import with_shares
from shoal.planner.refusal import refusal
from shoal.planner.search import Search
from shoal.planner.sized import Fitted
from shoal.planner.space import Degrees
from shoal.workload import Workload

OBJECTIVES = ("time", "money")
"""Objectives of the choice."""

ROWS = 5
"""Rows that get their last touches, whatever number is asked for: the best Plan must not depend on it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Plans, best first.

    Attributes:
        candidates: The best Plan for each set of degrees, best first; at least one.
        legal: Number of legal Plans on the number of devices that the best one has.
        played: Number of legal Plans that were played; bounds excluded the others.
        search: The search that found the best, for questions about it.
        resident: The best Plan without `offload`; None if none fits.
    """

    candidates: Sequence[Candidate]
    legal: int
    played: int
    search: Search
    resident: Candidate | None

    @property
    def best(self) -> Candidate:
        """The best candidate."""
        return self.candidates[0]

    def explain(self) -> Explanation:
        """Explain why it is the best; every Plan that it is compared with is played."""
        return explain(self.search, self.best, self.candidates, self.resident)


def choose(
    workload: Workload,
    cluster: Cluster,
    batch: int,
    *,
    objective: str = "time",
    margin: float = 0.1,
    limit: int = 5,
    precision: str | None = None,
    fork: bool = False,
    may_offload: bool = True,
) -> Choice:
    """Choose among all legal Plans.

    Args:
        workload: The training.
        cluster: The machines; by time all their devices take part, by money only as many as is cheapest.
        batch: Samples of a step.
        objective: One of OBJECTIVES.
        margin: Share of each device's memory that must stay free.
        limit: The most Plans to return.
        precision: The precision of all Plans; None for the type of 16 bits or more in which the device
            computes fastest. fp8 is never chosen without being asked for, as it trains with coarser numbers.
        fork: Whether a second process may be forked to search beside this one, which finds the same.
        may_offload: Whether a Plan may have `offload`; it is taken if it is quicker: see
            `shoal.planner.offloaded`.

    Raises:
        ConfigError: The objective, the margin, the limit or the precision is not possible.
        PlanError: No Plan is legal, or none fits the memory.
        ClusterError: The objective is money, and the Cluster has no price; or its device does not know the
            precision.
    """
    _require(objective in OBJECTIVES, "objective", objective, "one of " + ", ".join(OBJECTIVES))
    _require(0 <= margin < 1, "margin", margin, "a share of the memory, at least 0 and below 1")
    _require(limit >= 1, "limit", limit, "1 or more")
    if precision is not None:
        _require(precision in CHOICES["precision"], "precision", precision, ", ".join(CHOICES["precision"]))
        for device in devices_of(cluster):
            if precision == "fp8" and "fp8" not in device.peak:
                raise ClusterError(
                    f"precision=fp8 was asked for, and {device.name} has no rate in it",
                    possible=f"its types are {', '.join(device.peak)}",
                    change="leave out the precision, or choose devices with fp8",
                )
            device.flops(precision)  # raises
    if batch < 1:
        raise PlanError(
            f"a batch of {batch} has no samples", possible="1 or more", change="give a larger batch"
        )
    if objective == "money":
        search = cheapest(workload, cluster, batch, margin=margin, precision=precision)
    else:
        search = Search(workload, cluster, batch, margin=margin, precision=precision)
    if fork:
        search.fork()
    ranking = search.best(max(limit, ROWS))
    found = touched_up(search, ranking.found) if ranking.found else []
    resident = found[0] if found else None
    if may_offload:
        best = None if resident is None else Fitted(resident.plan, resident.memory, resident.seconds)
        taken = _outside(search, best)
        if taken is not None:
            search, outside = taken
            winner = search.candidate(outside)
            found = [winner, *(each for each in found if each.degrees != winner.degrees)]
    if not found:
        raise refusal(search)
    return Choice(found[:limit], ranking.legal, ranking.played, search, resident)


def _outside(search: Search, best: Fitted | None) -> tuple[Search, Fitted] | None:
    """Return the quickest Plan with `offload`, with its last touches, and the search that found it.

    Args:
        search: The search for Plans without.
        best: The best Plan without; None if none fits.

    Returns:
        None if no such Plan is quicker by LEAST_GAIN, or fits.
    """
    stores = stores_activations(search.cluster)
    taken = quicker_outside(search, best)
    starts = [] if taken is None else [(taken[0], _touched(*taken))]
    if best is not None and stores:
        starts.append((search, best))
    found = [(each, with_cheapest_blocks(each, start, may_store=stores)) for each, start in starts]
    quickest = min(found, key=lambda each: each[1].seconds, default=None)
    if quickest is None or (best is not None and quickest[1].seconds > (1 - LEAST_GAIN) * best.seconds):
        return None
    return quickest


def touched_up(search: Search, found: Sequence[Fitted]) -> list[Candidate]:
    """Return the Plans, best first; the first ROWS of them get the touches of `shoal.planner.polish`."""
    rows = found[:ROWS]
    touched = list(search.each(_touched, rows, [search.helps(Degrees.of(each.plan)) for each in rows]))
    touched += with_shares(search, ROWS)
    best = simplest(search, with_cheapest_blocks(search, min(touched, key=_seconds), may_store=False))
    quickest = {Degrees.of(best.plan): best}
    for each in sorted((*touched, *found[ROWS:]), key=_seconds):
        quickest.setdefault(Degrees.of(each.plan), each)
    return [search.candidate(each) for each in quickest.values()]


def _seconds(found: Fitted) -> float:
    return found.seconds


def _touched(search: Search, found: Fitted) -> Fitted:
    return with_found_schedule(search, polished(search, found))


def _require(holds: bool, name: str, value: object, possible: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} is not allowed", possible=possible, change=f"correct {name}")
