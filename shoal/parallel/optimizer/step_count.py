"""Comparison of how many optimizer steps ranks made: one that left a step out has weights of another step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from shoal.errors import TrainingError
from shoal.parallel.communication import Axis
from shoal.parallel.data.strategy import Strategy
from shoal.parallel.optimizer.norm import measure_gradient
from shoal.parallel.owned import Owned

_CYCLE = 256
"""Steps are compared modulo this, so that sums of squares over many ranks stay exact in fp64."""


@final
class StepCount:
    """Counts the steps of this rank's optimizers; several that follow one backward make one step.

    Args:
        strategies: The strategies of this rank's stages, which count backwards and learn of steps.
        is_stage: Whether other ranks have other stages: then a rank may have no optimizer.

    Attributes:
        made: Number of steps; negative while this rank may have no optimizer.
    """

    def __init__(self, strategies: Sequence[Strategy], *, is_stage: bool) -> None:
        self.made = -1 if is_stage else 0
        self._strategies = strategies
        self._backwards = 0

    def note(self) -> None:
        """Note that an optimizer changed parameters."""
        backwards = sum(each.backwards for each in self._strategies)
        if backwards != self._backwards:
            self.made = max(self.made, 0) + 1
            self._backwards = backwards
        for each in self._strategies:
            each.changed()

    def compared_norm(self, owned: Sequence[Owned], parts: Axis, device: torch.device) -> torch.Tensor:
        """Return the norm of the whole gradient, a scalar in fp64, of ranks that made equally many steps.

        Args:
            owned: This rank's parts of the parameters.
            parts: The ranks that together hold one whole state.
            device: Device on which to sum.

        Raises:
            TrainingError: They made different numbers of steps.
        """
        number = float(0 if self.made < 0 else self.made % _CYCLE + 1)
        measured = measure_gradient(owned, parts, device, (float(number > 0), number, number**2))
        ranks, total, squares = measured.sums.tolist()
        if ranks * squares != total**2:
            made = torch.zeros(parts.size, dtype=torch.float64, device=device)
            made[parts.index] = self.made
            parts.all_reduce(made, "steps").wait()
            require_equal_steps(dict(zip(parts.members, map(int, made.tolist()), strict=True)))
        return measured.whole


def require_equal_steps(made: Mapping[int, int]) -> None:
    """Check that all ranks that have an optimizer made equally many steps.

    Args:
        made: The number of steps by rank; negative for a rank without an optimizer.

    Raises:
        TrainingError: They did not.
    """
    ranks: dict[int, list[str]] = {}
    for rank, number in made.items():
        if number >= 0:
            ranks.setdefault(number, []).append(str(rank))
    if len(ranks) > 1:
        who = "; ".join(f"{number} on rank {', '.join(ranks[number])}" for number in sorted(ranks))
        raise TrainingError(
            "ranks made different numbers of optimizer steps, so their weights do not fit together: "
            f"{who}. Call optimizer.step() equally often on all ranks; gradient_norm() is equal on all of "
            "them, and can decide"
        )
