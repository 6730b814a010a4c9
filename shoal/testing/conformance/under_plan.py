"""The training of an entry under a Plan, by the library interface, as one of the ranks."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext

import torch

from shoal.collectives.values import broadcast_value
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
from shoal.train import load, save

__all__ = ["train_under"]


def train_under(task: Task, plan: Plan) -> Training:
    """Train an entry as one rank of the default process group.

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
    """Save the state of training, begin anew from other values, and load it."""
    again = parallelize(task.build(), parallel.plan)
    resumed = make_optimizer(again.parameters(), parallel.plan.precision)
    world = parallel.axes.world
    with tempfile.TemporaryDirectory() if world.index == 0 else nullcontext("") as folder:
        common = broadcast_value(folder) if world.size > 1 else folder
        save(common, parallel, optimizer)
        load(common, again, resumed)  # all ranks have read it when it returns on one
    return again, resumed


def _backward(task: Task, parallel: Parallel, step: int) -> float:
    """Run the forwards and backwards of a step, and return their mean loss."""
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
    """Return the mean loss of other samples, without gradients and in evaluation mode."""
    rank, ranks = parallel.axes.dp.index, parallel.axes.dp.size
    total = 0.0
    parallel.module.eval()
    with torch.no_grad():
        for part in micro_batches(task.batch(100 + step), BATCH, rank, ranks):
            total += float(task.loss(parallel, part)) / MICRO_BATCHES
    parallel.module.train()
    return total
