"""Entries whose layers keep no activations, and run a backward of their own inside the model's backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shoal.models.task import Task
from shoal.testing.zoo.vectors import WIDTH, error, vectors


def reversible_layers() -> Task:
    """Reversible layers (arXiv:1707.04585): each computes its input again, and runs its own backward."""
    return Task(build=Reversible, batch=vectors, loss=error)


def reversible_layers_last() -> Task:
    """The loss follows reversible layers, so that the first gradients come from a backward inside another."""
    return Task(build=lambda: Reversible(is_last=True), batch=vectors, loss=error)


def reversible_layers_shared() -> Task:
    """Reversible layers share weights, which get a gradient from each layer's own backward."""
    return Task(build=lambda: Reversible(is_shared=True), batch=vectors, loss=error)


class Coupling(nn.Module):
    """One reversible layer: `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH // 2, WIDTH // 2)
        self.second = nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        """Maps two halves `[batch, WIDTH / 2]` to two halves."""
        one = one + torch.tanh(self.first(two))
        return one, two + torch.tanh(self.second(one))

    def inverse(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the halves that `forward` gave these for."""
        two = two - torch.tanh(self.second(one))
        return one - torch.tanh(self.first(two)), two


class Reversible(nn.Module):
    """A layer, three reversible layers, and another layer.

    Args:
        is_last: Whether the last layer is left out.
        is_shared: Whether the reversible layers are one layer, used three times.
    """

    def __init__(self, *, is_last: bool = False, is_shared: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.couplings = nn.ModuleList(Coupling() for _ in range(1 if is_shared else 3))
        self.leave = nn.Identity() if is_last else nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, WIDTH]` to the same shape."""
        layers = [*self.couplings] * (3 // len(self.couplings))
        output: Tensor = self.leave(_Passed.apply(self.enter(inputs), layers))
        return output


class _Passed(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layers: list[Coupling]) -> Tensor:
        halves = hidden.chunk(2, -1)
        for layer in layers:
            halves = layer(*halves)
        ctx.layers = layers
        output = torch.cat(halves, -1)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        halves = output.chunk(2, -1)
        for layer in reversed(ctx.layers):
            with torch.no_grad():
                halves = layer.inverse(*halves)
            with torch.enable_grad():
                inputs = [half.detach().requires_grad_() for half in halves]
                torch.autograd.backward(torch.cat(layer(*inputs), -1), gradient)
            gradient = torch.cat([each.grad for each in inputs], -1)  # type: ignore[misc]
        return gradient, None
