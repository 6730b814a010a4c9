"""The choice: Plans of a Workload on a Cluster, best first by time or by money, or the reason for none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cluster import Cluster
from shoal.errors import ConfigError, PlanError
from shoal.planner.candidate import Candidate
from shoal.planner.explain import Explanation, explain
from shoal.planner.money import cheapest
from shoal.planner.refine import refined, with_found_schedule
from shoal.planner.refusal import refusal
from shoal.planner.search import Search
from shoal.workload import Workload

__all__ = ["OBJECTIVES", "Choice", "choose"]

OBJECTIVES = ("time", "money")
"""Objectives of the choice."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Plans, best first.

    Attributes:
        candidates: The best Plan for each set of degrees, best first; at least one.
        legal: Number of legal Plans on the number of devices that the best one has.
        timed: Number of legal Plans whose step was predicted in full; bounds excluded the others.
        search: The search that found the best, for questions about it.
    """

    candidates: Sequence[Candidate]
    legal: int
    timed: int
    search: Search

    @property
    def best(self) -> Candidate:
        """The best candidate."""
        return self.candidates[0]

    def explain(self) -> Explanation:
        """Explain why it is the best, in closed form: the Plans it is compared with are not simulated."""
        return explain(self.search, self.best.in_closed_form)


def choose(
    workload: Workload,
    cluster: Cluster,
    batch: int,
    *,
    objective: str = "time",
    margin: float = 0.1,
    limit: int = 5,
) -> Choice:
    """Choose among all legal Plans.

    Args:
        workload: The training.
        cluster: The machines; by time all their devices take part, by money only as many as is cheapest.
        batch: Samples of a step.
        objective: One of OBJECTIVES.
        margin: Share of each device's memory that must stay free.
        limit: The most Plans to return.

    Raises:
        ConfigError: The objective, the margin or the limit is not possible.
        PlanError: No Plan is legal, or none fits the memory.
        ClusterError: The objective is money, and the Cluster has no price.
    """
    _require(objective in OBJECTIVES, "objective", objective, "one of " + ", ".join(OBJECTIVES))
    _require(0 <= margin < 1, "margin", margin, "a share of the memory, at least 0 and below 1")
    _require(limit >= 1, "limit", limit, "1 or more")
    if batch < 1:
        raise PlanError(
            f"a batch of {batch} has no samples", possible="1 or more", change="give a larger batch"
        )
    search = Search(workload, cluster, batch, margin=margin)
    if objective == "money":
        candidates = cheapest(workload, cluster, batch, margin=margin, limit=limit)
        if candidates:
            played = refined(candidates, lambda each: each.dollars_per_step / each.batch)
            search = Search(workload, played[0].cluster, batch, margin=margin)
            ranking = search.best(1)
            return Choice(played, ranking.legal, ranking.timed, search)
    else:
        ranking = search.best(limit)
        if ranking.candidates:
            played = refined(ranking.candidates, lambda each: each.seconds)
            return Choice(with_found_schedule(search, played), ranking.legal, ranking.timed, search)
    raise refusal(search)


def _require(holds: bool, name: str, value: object, possible: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} is not allowed", possible=possible, change=f"correct {name}")
