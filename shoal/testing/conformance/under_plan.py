"""The training of an entry under a Plan, by the library face, as one of the ranks."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from shoal.errors import TrainingError, UserError
from shoal.models.task import Task
from shoal.parallel import Parallel, parallelize
from shoal.plan import Plan
from shoal.testing.conformance.training import (
    CLIP,
    EVALUATED_BEFORE,
    MICRO_BATCHES,
    RESUMED_BEFORE,
    STEPS,
    Training,
    make_optimizer,
    micro_batches,
    seed_forward,
)
from shoal.testing.zoo.vectors import BATCH

__all__ = ["train_under"]


def train_under(task: Task, plan: Plan) -> Training:
    """Trains an entry as one rank of the default process group.

    Returns:
        Its losses are those of this rank alone; its state is there on rank 0.

    Raises:
        UserError: The entry is refused, before the optimizer's first step.
    """
    torch.manual_seed(0)
    parallel = parallelize(task.build(), plan)
    optimizer = make_optimizer(parallel.parameters(), plan.precision)
    losses, evaluated, norms = [_backward(task, parallel, 0)], [], [parallel.clip_gradients(CLIP)]
    try:
        for step in range(1, STEPS + 1):
            optimizer.step()
            optimizer.zero_grad()
            if step in EVALUATED_BEFORE:
                evaluated.append(_evaluated(task, parallel, step))
            if step == RESUMED_BEFORE:
                parallel, optimizer = _resumed(task, parallel, optimizer)
            if step < STEPS:
                losses.append(_backward(task, parallel, step))
                norms.append(parallel.clip_gradients(CLIP))
        return Training(parallel.full_state_dict(), [losses], [evaluated], norms)
    except UserError as error:
        raise TrainingError(f"refused too late, after the first step: {error.given}") from error


def _resumed(
    task: Task, parallel: Parallel, optimizer: torch.optim.Optimizer
) -> tuple[Parallel, torch.optim.Optimizer]:
    """Saves the state of training, begins anew from other values, and loads it."""
    model_state, optimizer_state = parallel.full_state_dict(), optimizer.state_dict()
    module = _with_state(task.build(), model_state)
    again = parallelize(module, parallel.plan)
    resumed = make_optimizer(again.parameters(), parallel.plan.precision)
    resumed.load_state_dict(optimizer_state)
    return again, resumed


def _with_state(module: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    """The module with the values that rank 0 has; `parallelize` gives them to the others."""
    if state:
        module.load_state_dict(state)
    return module


def _backward(task: Task, parallel: Parallel, step: int) -> float:
    """Makes the forwards and backwards of a step, and gives their mean loss."""
    rank, ranks = parallel.axes.dp.index, parallel.axes.dp.size
    total = 0.0
    for number, part in enumerate(micro_batches(task.batch(step), BATCH, rank, ranks)):
        seed_forward(step, rank, number)
        loss = task.loss(parallel, part) / MICRO_BATCHES
        total += float(loss.detach())
        with parallel.accumulate() if number + 1 < MICRO_BATCHES else nullcontext():
            loss.backward()
    return total


def _evaluated(task: Task, parallel: Parallel, step: int) -> float:
    """The mean loss of other samples, without gradients and in evaluation mode."""
    rank, ranks = parallel.axes.dp.index, parallel.axes.dp.size
    total = 0.0
    parallel.module.eval()
    with torch.no_grad():
        for part in micro_batches(task.batch(100 + step), BATCH, rank, ranks):
            total += float(task.loss(parallel, part)) / MICRO_BATCHES
    parallel.module.train()
    return total
