"""Seconds of a rank's stages for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cost.time.data_parallel import StageWork
from shoal.plan import SettledPlan
from shoal.workload import Parameters


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of all stages of one rank, for one micro-batch.

    Attributes:
        forward, input, weight: Seconds of forward and of the two halves of backward, with waits in blocks.
        tensor, context, expert: Seconds of communication in these, forward and backward together.
        late: Seconds in these that ranks wait for late ranks.
        parameters: Number of parameters on the rank.
        stages: Work of each stage.
    """

    forward: float
    input: float
    weight: float
    tensor: float
    context: float
    expert: float
    late: float
    parameters: Parameters
    stages: tuple[StageWork, ...]

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.input + self.weight


def works_by_stage(plan: SettledPlan, stages: Sequence[StageCost]) -> list[StageWork]:
    """Return the work of each stage of the pipeline, from that of each rank."""
    held = [iter(each.stages) for each in stages]
    return [next(held[rank]) for rank in (plan.placement if plan.pp > 1 else (0,))]


def backward_waited_for(plan: SettledPlan, work: StageWork) -> float:
    """Return the seconds of the part of a stage's backward that the stage before waits for."""
    return work.backward - work.weight if plan.has_halves else work.backward
