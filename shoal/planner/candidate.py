"""A Plan with its predictions."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cluster import Cluster
from shoal.cost import RankMemory
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
        workload: The training.
        cluster: The machines that it runs on; all their devices take part.
        batch: Samples of a step.
        memory: Memory of the rank that holds most.
        seconds: Seconds of a step, played.
    """

    plan: SettledPlan
    workload: Workload
    cluster: Cluster
    batch: int
    memory: RankMemory
    seconds: float

    @property
    def degrees(self) -> Degrees:
        """The parallel degrees of the Plan."""
        plan = self.plan
        return Degrees(plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)

    @property
    def degrees_text(self) -> str:
        """The degrees above 1, as in a Plan's text."""
        above = [f"{name}={value}" for name, value in self.degrees._asdict().items() if value > 1]
        return ",".join(above) or "dp=1"

    @property
    def layout(self) -> str:
        """The Plan's text without the numbers of blocks in its stages, which may be many."""
        return str(self.plan if self.plan.split == "count" else self.plan.replace(split="cost"))

    @property
    def devices(self) -> int:
        """Number of devices that take part."""
        return self.plan.ranks

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together."""
        return self.batch * self.workload.length / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOP, with the whole square of positions in attention, as a share of the devices' peak."""
        peak = self.cluster.device.flops(self.plan.precision) * self.devices
        return self.batch * self.workload.training_flop / (self.seconds * peak)

    @property
    def communication(self) -> float:
        """Exposed communication, as a share of the step."""
        parts = self.cost.parts
        exposed = sum(parts[name] for name in ("tensor", "context", "expert", "pipeline", "data"))
        return exposed / self.cost.seconds

    @property
    def dollars_per_step(self) -> float:
        """Dollars of a step; 0 if the price is not known."""
        return self.seconds * self.devices * self.cluster.price / _SECONDS_PER_HOUR

    @property
    def dollars_per_billion_tokens(self) -> float:
        """Dollars of a billion tokens; 0 if the price is not known."""
        return self.dollars_per_step * 1e9 / (self.batch * self.workload.length)
