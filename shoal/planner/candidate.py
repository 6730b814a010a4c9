"""A Plan with what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.cluster import Cluster
from shoal.cost import RankMemory, StepCost
from shoal.plan import SettledPlan
from shoal.planner.space import Degrees
from shoal.workload import Workload

__all__ = ["Candidate"]

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Candidate:
    """A Plan with its predicted step and memory.

    Attributes:
        plan: The Plan.
        workload: What it trains.
        cluster: Where, all of whose devices take part.
        batch: Samples of a step.
        cost: Of a step, in seconds by part.
        memory: Of the rank that holds most.
        simulated: Seconds of a step as the simulator plays it; None: the closed form is all there is.
    """

    plan: SettledPlan
    workload: Workload
    cluster: Cluster
    batch: int
    cost: StepCost
    memory: RankMemory
    simulated: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step: as the simulator plays it, where it did."""
        return self.cost.seconds if self.simulated is None else self.simulated

    @property
    def source(self) -> str:
        """Where the seconds come from."""
        return "in closed form" if self.simulated is None else "simulated"

    @property
    def in_closed_form(self) -> Candidate:
        """To compare with Plans that were not simulated."""
        return replace(self, simulated=None)

    @property
    def degrees(self) -> Degrees:
        """How the devices are shared out."""
        plan = self.plan
        return Degrees(plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)

    @property
    def degrees_text(self) -> str:
        """Those above 1, as in a Plan's text."""
        above = [f"{name}={value}" for name, value in self.degrees._asdict().items() if value > 1]
        return ",".join(above) or "dp=1"

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
        """Tokens per second of all devices together."""
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
        return exposed / self.cost.seconds

    @property
    def dollars_per_step(self) -> float:
        """0 where the price is not known."""
        return self.seconds * self.devices * self.cluster.price / _SECONDS_PER_HOUR

    @property
    def dollars_per_billion_tokens(self) -> float:
        """0 where the price is not known."""
        return self.dollars_per_step * 1e9 / (self.batch * self.workload.length)
