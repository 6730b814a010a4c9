"""The settings of a Plan that decide how long a block takes on a rank; block costs are cached by them."""

from __future__ import annotations

from typing import NamedTuple

from shoal.spec.plan import DEFAULT_ORDER, Group, Groups, SettledPlan, element_bytes
from shoal.spec.plan.groups import context_group, expert_group, tensor_group
from shoal.spec.workload import Block, Part


class Layout(NamedTuple):
    """How one micro-batch of a block is laid over ranks.

    Attributes:
        microbatch: Samples in one forward of a rank.
        tp, cp, ep: The degrees of tensor, context and expert parallelism.
        tensor: The Plan's kind of tensor parallelism.
        context: The Plan's kind of context parallelism.
        recompute: The Plan's recompute policy, for blocks that are not kept.
        precision: The Plan's precision.
        compile: The Plan's setting for torch.compile.
        apart: The groups of tp, cp and ep, if the Plan's `order` is not the default one; otherwise None.
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
    apart: tuple[Group, Group, Group] | None = None

    @classmethod
    def of(cls, plan: SettledPlan) -> Layout:
        """Return the layout of a Plan."""
        groups = None if plan.order == DEFAULT_ORDER else Groups.of(plan)
        return cls(
            plan.microbatch,
            plan.tp,
            plan.cp,
            plan.ep,
            plan.tensor,
            plan.context,
            plan.recomputed.policy,
            plan.precision,
            plan.compile,
            None if groups is None else (groups.tp, groups.cp, groups.ep),
        )

    @property
    def tensor_group(self) -> Group:
        """Ranks with other parts of the same layers."""
        return tensor_group(self.tp) if self.apart is None else self.apart[0]

    @property
    def context_group(self) -> Group:
        """Ranks with other parts of the same samples."""
        return context_group(self.tp, self.cp) if self.apart is None else self.apart[1]

    @property
    def expert_group(self) -> Group:
        """Ranks with other experts."""
        return expert_group(self.tp, self.ep) if self.apart is None else self.apart[2]

    @property
    def width(self) -> int:
        """Bytes of an element in the type of the compute."""
        return element_bytes(self.precision)

    def policy(self, block: Block, *, is_layer: bool) -> str:
        """Return the recompute policy of a block; embedding and end have none."""
        return self.recompute if is_layer and not block.is_kept else "none"

    def experts(self, copies: int) -> int:
        """Return one rank's number of experts, if a layer has `copies` of them; 1 of a plain operation."""
        return max(1, copies // self.ep) if copies > 1 else 1

    def share(self, part: Part) -> float:
        """Return one rank's part of a sample's elements or rows, times the samples of a micro-batch."""
        if part is Part.POSITIONS:
            return 1 / self.cp
        samples = self.microbatch / self.cp
        if part is Part.WHOLE or (part is Part.STREAM and self.tensor == "plain"):
            return samples
        return samples / self.tp
