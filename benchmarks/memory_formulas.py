"""Memory of a rank by formula, for `memory.py` and `pipeline_memory.py`: what `shoal.predict.cost` says.

The formulas are in `shoal/predict/cost/memory`: states in `memory.py`, activations in `activations.py`, of
the tensors that `shoal/spec/workload/transformer.py` lists, and the moments at which a peak can be in
`rank.py`. On a CPU a norm is several kernels, which keep more than one does.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models import TransformerConfig
from shoal.predict.cost import Memories, RankMemory
from shoal.spec.plan import Plan
from shoal.spec.workload import Workload, transformer_shape, workload_of

__all__ = ["Case", "workload_on_cpu"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model's shape under a Plan.

    Attributes:
        shape: The model's.
        plan: How it is laid out; without stages.
        microbatch: Sequences of one forward, and all of a rank's batch.
        copies: Whether the backend copies what it reduces and scatters, as gloo does.
    """

    shape: TransformerConfig
    plan: Plan
    microbatch: int
    copies: bool = True

    def memory(self) -> RankMemory:
        """Of a rank."""
        plan = self.plan.replace(microbatch=self.microbatch)
        memories = Memories(workload_on_cpu(self.shape), copies=self.copies)
        return memories.fullest(plan, plan.dp * self.microbatch)


def workload_on_cpu(shape: TransformerConfig) -> Workload:
    """The Workload of a transformer whose norms are several kernels."""
    return workload_of(transformer_shape(shape.model_dump()).replace(fused_passes=False))
