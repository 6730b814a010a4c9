"""The training of an entry in plain PyTorch, on one device that plays all ranks.

The device sees the micro-batches of all ranks, one after another, and averages their gradients in fp32. So
batch normalization normalizes the same rows, and the weights must agree. Each rank has its own state that a
forward changes, such as running statistics: the device keeps buffers for each rank.

In bf16 the optimizer's weights are fp32, and a copy of the module computes, cast by `shoal.models.precision`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal.models import SingleDevice, Task, cast_module
from shoal.testing.conformance.case import PRECISIONS
from shoal.testing.conformance.training import (
    CLIP,
    EVALUATED_BEFORE,
    MICRO_BATCHES,
    STEPS,
    Training,
    make_optimizer,
    micro_batches,
    seed_forward,
)
from shoal.testing.zoo.vectors import BATCH

__all__ = ["train_alone"]


def train_alone(task: Task, precision: str, ranks: int, *, compute: str = "") -> Training:
    """Train an entry as this many ranks would.

    Args:
        task: The entry.
        precision: fp32 or bf16.
        ranks: Number of ranks.
        compute: The type that computes, if it is not that of `precision`.
    """
    torch.manual_seed(0)
    master = task.build()
    module = copy.deepcopy(master)
    dtype = PRECISIONS[compute or precision]
    cast_module(module, dtype)
    model = SingleDevice(module, dtype)
    optimizer = make_optimizer((each for each in master.parameters() if each.requires_grad), precision)
    buffers = [_copies(master) for _ in range(ranks)]
    losses: list[list[float]] = [[] for _ in range(ranks)]
    evaluated: list[list[float]] = [[] for _ in range(ranks)]
    norms = []
    for step in range(STEPS + 1):
        _show(master, module)
        if step in EVALUATED_BEFORE:
            module.eval()
            with torch.no_grad():
                for rank in range(ranks):
                    evaluated[rank].append(_forward(task, model, buffers[rank], 100 + step, rank, ranks))
            module.train()
        if step == STEPS:
            break
        for rank in range(ranks):
            losses[rank].append(_forward(task, model, buffers[rank], step, rank, ranks, master))
        norms.append(_clip(master))
        optimizer.step()
        optimizer.zero_grad()
    _put(buffers[0], master)
    state = {name: each.detach().clone() for name, each in master.state_dict().items()}
    return Training(state, losses, evaluated, norms)


def _forward(
    task: Task,
    model: SingleDevice,
    buffers: dict[str, Tensor],
    step: int,
    rank: int,
    ranks: int,
    master: nn.Module | None = None,
) -> float:
    """Return the mean loss of a rank's micro-batches; add its gradients to `master`'s, if there is one."""
    _put(buffers, model.module)
    total = 0.0
    for number, part in enumerate(micro_batches(task.batch(step), BATCH, rank, ranks)):
        seed_forward(step, rank, number)
        loss = task.loss(model, part) / MICRO_BATCHES
        total += float(loss.detach())
        if master is not None:
            loss.backward()
            _add_gradients(model.module, master, ranks)
    for name, buffer in model.module.named_buffers():
        buffers[name].copy_(buffer)
    return total


def _add_gradients(module: nn.Module, master: nn.Module, ranks: int) -> None:
    for own, whole in zip(module.parameters(), master.parameters(), strict=True):
        if own.grad is not None:
            part = own.grad.float() / ranks
            whole.grad = part if whole.grad is None else whole.grad + part
            own.grad = None


def _show(master: nn.Module, module: nn.Module) -> None:
    """Copy the optimizer's weights to those that compute."""
    with torch.no_grad():
        for whole, own in zip(master.parameters(), module.parameters(), strict=True):
            own.copy_(whole)


def _copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _put(buffers: Mapping[str, Tensor], module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def _clip(module: nn.Module) -> float:
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, CLIP / norm))
    return norm
