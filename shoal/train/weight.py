"""The weight of each micro-batch's mean loss in the gradient of a step.

The loss of a batch is the mean over all its elements that count, in all micro-batches, on all ranks with
other data. Each micro-batch gives the mean over its own elements. Gradients are averaged over micro-batches
and ranks, so a micro-batch's mean is multiplied by `its count x micro-batches of all ranks / the count of
all`: exactly 1 if all counts are equal. One all-reduce of a number, which runs during the first forward, sums
the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from shoal.models.nested import tensors_in
from shoal.parallel import Axis


@final
class Weights:
    """The factors of a step's micro-batches.

    Args:
        counts: Counts of this rank's micro-batches.
        mean_of: Number of micro-batches over which this rank averages.
        data: The ranks with other data, each of which makes a Weights.
        device: Device of the losses.
    """

    def __init__(self, counts: Sequence[float], mean_of: float, data: Axis, device: torch.device) -> None:
        self._counts = counts
        self._means = mean_of * data.size
        self._total = torch.full((), float(sum(counts)), dtype=torch.float64, device=device)
        self._pending = data.all_reduce(self._total, "counted")
        self._is_there = False

    def of(self, number: int) -> torch.Tensor:
        """Return the factor of a micro-batch, fp64; at least one of its elements must count."""
        return self._counts[number] * self._means / self.total

    @property
    def total(self) -> torch.Tensor:
        """Return the number of elements that count in the whole batch."""
        if not self._is_there:
            self._pending.wait()
            self._is_there = True
        return self._total


def nothing_of(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a loss of zero, whose backward goes through the model with zeros.

    If no element counts, the mean is 0 / 0, and its gradients may be too. The backward is needed
    nevertheless: other ranks wait for its communication.
    """
    ends = [each for each in tensors_in(output) if each.requires_grad and each is not loss]
    if not ends and hasattr(output, "logits"):
        ends = [each for each in tensors_in(output.logits) if each.requires_grad]
    result: torch.Tensor = _Nothing.apply(*(ends or [loss]))
    return result


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*ends)
        return torch.zeros((), device=ends[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(end) for end in ctx.saved_tensors)
