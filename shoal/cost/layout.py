"""The settings of a Plan that decide how long a block takes on a rank; block costs are cached by them."""

from __future__ import annotations

from typing import NamedTuple

from shoal.plan import SettledPlan, element_bytes
from shoal.workload import Part

__all__ = ["Layout"]


class Layout(NamedTuple):
    """How one micro-batch of a block is laid over ranks.

    Attributes:
        microbatch: Samples in one forward of a rank.
        tp, cp, ep: The degrees of tensor, context and expert parallelism.
        tensor: The Plan's kind of tensor parallelism.
        context: The Plan's kind of context parallelism.
        recompute: The Plan's recompute policy.
        precision: The Plan's precision.
        compile: The Plan's setting for torch.compile.
    """

    microbatch: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    tensor: str = "sequence"
    context: str = "ring"
    recompute: str = "none"
    precision: str = "bf16"
    compile: str = "auto"

    @classmethod
    def of(cls, plan: SettledPlan) -> Layout:
        """Return the layout of a Plan."""
        return cls(
            plan.microbatch,
            plan.tp,
            plan.cp,
            plan.ep,
            plan.tensor,
            plan.context,
            plan.recompute,
            plan.precision,
            plan.compile,
        )

    @property
    def width(self) -> int:
        """Bytes of an element in the type of the compute."""
        return element_bytes(self.precision)

    def share(self, part: Part) -> float:
        """Return one rank's part of a sample's elements or rows, times the samples of a micro-batch."""
        if part is Part.POSITIONS:
            return 1 / self.cp
        samples = self.microbatch / self.cp
        if part is Part.WHOLE or (part is Part.STREAM and self.tensor == "plain"):
            return samples
        return samples / self.tp
