"""A Plan with its predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shoal.predict.cost import Costs, RankMemory
from shoal.predict.planner.space import Degrees
from shoal.predict.simulate import BUBBLE, played_parts
from shoal.spec.cluster import Cluster, dollars, peak_of_all
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import Workload

COMMUNICATION = ("tensor", "context", "expert", "pipeline", "data")
"""The parts of a step that are exposed communication."""


@dataclass(frozen=True)
class Candidate:
    """A Plan with its predicted step and memory.

    Attributes:
        plan: The Plan.
        workload: The training.
        cluster: The machines that it runs on; all their devices take part.
        batch: Samples of a step.
        memory: Memory of the rank that holds most.
        seconds: Seconds of a step, played.
        costs: Costs of the workload on the cluster.
    """

    plan: SettledPlan
    workload: Workload
    cluster: Cluster
    batch: int
    memory: RankMemory
    seconds: float
    costs: Costs = field(repr=False, compare=False)

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Where the seconds of a step go on the rank that waits least."""
        return played_parts(self.costs, self.plan, self.batch)

    @property
    def degrees(self) -> Degrees:
        """The parallel degrees of the Plan."""
        return Degrees.of(self.plan)

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
        peak = peak_of_all(self.cluster, self.plan.precision)
        return self.batch * self.workload.training_flop / (self.seconds * peak)

    @property
    def communication(self) -> float:
        """Exposed communication, as a share of the step."""
        return sum(self.parts.get(name, 0.0) for name in COMMUNICATION) / self.seconds

    @property
    def bubble(self) -> float:
        """Waits along the pipeline for a rank that has not sent yet, as a share of the step."""
        return self.parts.get(BUBBLE, 0.0) / self.seconds

    @property
    def dollars_per_step(self) -> float:
        """Dollars of a step, spare nodes included; 0 if the price is not known."""
        return dollars(self.cluster, self.seconds) if self.cluster.price else 0.0

    @property
    def dollars_per_billion_tokens(self) -> float:
        """Dollars of a billion tokens; 0 if the price is not known."""
        return self.dollars_per_step * 1e9 / (self.batch * self.workload.length)
