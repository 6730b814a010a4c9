"""Entries whose loss takes more than the output of one forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.task import Task
from shoal.testing.zoo.structure import Stack
from shoal.testing.zoo.vectors import WIDTH, error, vectors


class WithReference(nn.Module):
    """A model that is trained, and a frozen copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Stack()
        self.reference = copy.deepcopy(self.policy).requires_grad_(requires_grad=False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Map `[batch, WIDTH]` to the outputs of both, of the same shape."""
        return self.policy(inputs), self.reference(inputs)


class Routed(nn.Module):
    """Weighs two layers by a router, and leaves the router's own loss in an attribute."""

    balance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[batch, WIDTH]` to the same shape."""
        shares = self.router(inputs).softmax(-1)
        self.balance = shares.float().mean(0).square().sum()
        outputs = torch.stack([expert(inputs) for expert in self.experts], dim=-1)
        return inputs + (outputs * shares[:, None]).sum(-1)


def gradient_penalty() -> Task:
    """The loss has a gradient in it: that of the output by the input (WGAN-GP)."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            return error(model, batch)
        inputs = batch["x"].clone().requires_grad_()
        outputs = model(inputs).float()
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.mse_loss(outputs, batch["y"]) + 0.1 * (slope.norm(dim=-1) - 1).square().mean()

    return Task(build=Stack, batch=vectors, loss=loss)


def frozen_reference() -> Task:
    """The loss holds a model against a frozen copy of what it began as (DPO, distillation)."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        trained, frozen = (outputs.float() for outputs in model(batch["x"]))
        return F.mse_loss(trained, batch["y"]) + 0.1 * F.mse_loss(trained, frozen)

    return Task(build=WithReference, batch=vectors, loss=loss)


def loss_in_attribute() -> Task:
    """Layers leave losses of their own in attributes, which are added to the model's (a router's balance)."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        told = error(model, batch)
        return told + 0.1 * sum(each.balance for each in model.module.modules() if isinstance(each, Routed))

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(), Routed(), nn.Linear(WIDTH, WIDTH))

    return Task(build=build, batch=vectors, loss=loss)
