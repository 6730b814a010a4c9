"""A model laid over the ranks, as the one who trains it sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn

from shoal.parallel.bucket import Owned
from shoal.parallel.communication import Axes
from shoal.parallel.strategy import Strategy
from shoal.plan import Plan

__all__ = ["Parallel"]


@final
class Parallel:
    """A model laid over the ranks; `shoal.parallelize` makes one.

    Call it like the model. After `backward()` the gradients of `parameters()` are averages over all
    data-parallel ranks; after the optimizer's step the next call computes with the new weights.

    Attributes:
        module: The model. Its own parameters are whole and up to date within `gathered()`.
        plan: The Plan that was applied.
        axes: The groups that it communicates over.
    """

    def __init__(self, module: nn.Module, plan: Plan, axes: Axes, strategy: Strategy) -> None:
        self.module = module
        self.plan = plan
        self.axes = axes
        self._strategy = strategy
        self._dtype = torch.bfloat16 if plan.precision == "bf16" else None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward; with precision=bf16, floating inputs are cast."""
        if self._dtype is not None:
            inputs = tuple(self._cast(value) for value in inputs)
            named = {name: self._cast(value) for name, value in named.items()}
        return self.module(*inputs, **named)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What to give the optimizer: the part of each parameter that this rank owns, in fp32.

        Parts are flat where they are parts, so an optimizer must work element by element, as SGD and Adam do.
        """
        return (owned.parameter for owned in self.owned)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `parameters`, with the names of the whole parameters."""
        return ((owned.name, owned.parameter) for owned in self.owned)

    @property
    def owned(self) -> Sequence[Owned]:
        """What this rank owns, with where it lies in the whole parameters."""
        return self._strategy.owned

    def accumulate(self) -> AbstractContextManager[None]:
        """For all micro-batches of a step but the last: backward adds to the gradients.

        Replicated and ZeRO-1 communicate nothing within it.
        """
        return self._strategy.accumulate()

    def zero_grad(self) -> None:
        """Forgets all gradients, also those within a step that is given up between its micro-batches.

        After a whole step the optimizer's own `zero_grad` does as much.
        """
        self._strategy.clear()
        for owned in self.owned:
            owned.parameter.grad = None

    def gathered(self) -> AbstractContextManager[None]:
        """Within it, every parameter of `module` is whole and up to date; all ranks enter it together."""
        return self._strategy.gathered()

    def changed(self) -> None:
        """To be called after owned parameters were changed other than after a backward."""
        self._strategy.changed()

    def local(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a batch `[batch, ...]` that all ranks have.

        Raises:
            PlanError: The batch does not divide.
        """
        self.plan.replace(microbatch=None).with_microbatch_for(len(batch))
        return batch.chunk(self.axes.dp.size)[self.axes.dp.index]

    def gradient_norm(self) -> float:
        """The Euclidean norm of the whole averaged gradient; the same on every rank."""
        gradients = [owned.parameter.grad for owned in self.owned if owned.parameter.grad is not None]
        device = next(self.module.parameters()).device
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros((), device=device)]
        squares = torch.stack(list(norms)).double().square().sum()
        self.axes.shard.all_reduce(squares, "gradient norm").wait()
        return math.sqrt(squares.item())

    def clip_gradients(self, limit: float) -> float:
        """Scales the whole gradient down to the norm `limit` if it is above it.

        Returns:
            The norm before.
        """
        norm = self.gradient_norm()
        if norm > limit:
            gradients = [owned.parameter.grad for owned in self.owned if owned.parameter.grad is not None]
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._dtype)
        return value
