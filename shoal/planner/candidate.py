"""A Plan with what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cluster import Cluster
from shoal.cost.memory import RankMemory
from shoal.cost.step import StepCost
from shoal.plan import Plan
from shoal.planner.space import Degrees
from shoal.workload import Workload

__all__ = ["Candidate"]

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Candidate:
    """A Plan with what is predicted of it.

    Attributes:
        plan: The Plan.
        workload: What it trains.
        cluster: Where, all of whose devices take part.
        batch: Samples of a step.
        cost: Of a step, in seconds by part.
        memory: Of the rank that holds most.
    """

    plan: Plan
    workload: Workload
    cluster: Cluster
    batch: int
    cost: StepCost
    memory: RankMemory

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.cost.seconds

    @property
    def degrees(self) -> Degrees:
        """How the devices are shared out."""
        plan = self.plan
        return Degrees(plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)

    @property
    def layout(self) -> str:
        """The Plan's text without the numbers of blocks in its stages, which may be many."""
        return str(self.plan if self.plan.split == "count" else self.plan.replace(split="cost"))

    @property
    def devices(self) -> int:
        """That take part."""
        return self.plan.ranks

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.batch * self.workload.length / self.seconds

    @property
    def mfu(self) -> float:
        """FLOP of the model, attention over the whole square of positions, over what the devices could do."""
        peak = self.cluster.device.peak[self.plan.precision] * self.devices
        return self.batch * self.workload.training_flop / (self.seconds * peak)

    @property
    def communication(self) -> float:
        """Share of the step that is communication which nothing hides."""
        parts = self.cost.parts
        exposed = sum(parts[name] for name in ("tensor", "context", "expert", "pipeline", "data"))
        return exposed / self.seconds

    @property
    def dollars_per_step(self) -> float:
        """0 where the price is not known."""
        return self.seconds * self.devices * self.cluster.price / _SECONDS_PER_HOUR

    @property
    def dollars_per_billion_tokens(self) -> float:
        """0 where the price is not known."""
        return self.dollars_per_step * 1e9 / (self.batch * self.workload.length)
