"""Trains a Task under a Plan as a user of the library does: with a loop around `shoal.parallelize`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

import torch

from shoal.check.distributed import RankStep, fragment_of, gradient_of, groups_freed
from shoal.check.task_trial import TaskSamples, TaskTrial
from shoal.check.trial import CLIP, OPTIMIZER
from shoal.collectives.values import broadcast_value
from shoal.errors import TrainingError, UserError
from shoal.models import batch_normalizations, map_tensors
from shoal.parallel import Parallel, parallelize
from shoal.parallel.micro_batches import run_one_by_one
from shoal.plan import Plan, SettledPlan
from shoal.train import load, save
from shoal.train.learning_rate import learning_rate
from shoal.train.optimizer import groups_by_decay


def train_task_under(trial: TaskTrial, plan: Plan, device: torch.device) -> list[RankStep]:
    """Train as one rank of the default process group.

    Raises:
        UserError: The model cannot be laid out, or the Plan does not fit.
        TrainingError: It is refused only after the first step.
    """
    steps: list[RankStep] = []
    try:
        with ExitStack() as groups:
            for step in _steps(trial, SettledPlan.of(plan, trial.batch), device, groups):
                steps.append(step)
    except UserError as error:
        if not steps:
            raise
        raise TrainingError(f"refused too late, after the first step: {error.given}") from error
    return steps


def _laid_out(
    trial: TaskTrial, plan: Plan, device: torch.device, groups: ExitStack
) -> tuple[Parallel, torch.optim.Optimizer]:
    """Return the model with its first values under the Plan, whose groups live for a context."""
    model = trial.build_with_values(device)
    parallel = parallelize(model, plan, device=device, offload_folder=tempfile.gettempdir())
    groups.enter_context(groups_freed(parallel))
    parts = groups_by_decay(parallel.owned, OPTIMIZER.weight_decay)
    return parallel, torch.optim.AdamW(parts, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)


def _save_and_load(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    again: Parallel,
    resumed: torch.optim.Optimizer,
) -> None:
    """Save the state of training, and load it into another model and optimizer."""
    world = parallel.axes.world
    with tempfile.TemporaryDirectory() if world.index == 0 else nullcontext("") as folder:
        common = broadcast_value(folder) if world.size > 1 else folder
        save(common, parallel, optimizer)
        load(common, again, resumed)  # all ranks have read it when it returns on one


def _steps(
    trial: TaskTrial, plan: SettledPlan, device: torch.device, groups: ExitStack
) -> Iterator[RankStep]:
    samples, microbatch = trial.samples(), plan.microbatch
    parallel, optimizer = _laid_out(trial, plan, device, groups)
    # Statistics of batches differ between ranks, and with shares ranks make unlike numbers of forwards.
    is_comparable = not batch_normalizations(parallel.module) and parallel.plan.shared is None
    has_buffers = trial.buffers and parallel.axes.world.index == 0
    for number in range(trial.steps):
        if number == trial.resumed_before:
            again, resumed = _laid_out(trial, plan, device, groups)
            _save_and_load(parallel, optimizer, again, resumed)
            parallel, optimizer = again, resumed
        data = parallel.axes.data
        rate = learning_rate(OPTIMIZER, step=number, steps=trial.steps, batch=trial.batch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        own = parallel.local(torch.tensor(trial.batch_of(number))).tolist()
        micro = [own[start : start + microbatch] for start in range(0, len(own), microbatch)]
        parallel.set_micro_batches(len(micro))
        forwards = (partial(_loss, trial, samples, chosen, parallel, device) for chosen in micro)
        total = run_one_by_one(
            forwards, len(micro), parallel.accumulate, mean_of=parallel.mean_of(len(micro))
        )
        data.all_reduce(total, "loss").wait()
        gradients = [fragment_of(owned, gradient_of(owned)) for owned in parallel.owned]
        norm = parallel.clip_gradients(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        parameters = [fragment_of(owned, owned.local) for owned in parallel.owned]
        evaluation = _evaluated(trial, samples, micro, parallel, device) if is_comparable else None
        named = parallel.module.named_buffers(remove_duplicate=False) if has_buffers else ()
        buffers = {name: buffer.cpu().clone() for name, buffer in named}
        yield RankStep(total.item() / data.size, norm, own, gradients, parameters, evaluation, buffers)


def _evaluated(
    trial: TaskTrial,
    samples: TaskSamples,
    micro: Sequence[Sequence[int]],
    parallel: Parallel,
    device: torch.device,
) -> float:
    """Return the mean loss of all ranks' micro-batches in evaluation."""
    parallel.module.eval()
    with torch.no_grad():
        losses = [_loss(trial, samples, chosen, parallel, device).float() for chosen in micro]
        total = torch.stack(losses).mean()
    parallel.module.train()
    parallel.axes.data.all_reduce(total, "validation").wait()
    return total.item() / parallel.axes.data.size


def _loss(
    trial: TaskTrial,
    samples: TaskSamples,
    chosen: Sequence[int],
    parallel: Parallel,
    device: torch.device,
) -> torch.Tensor:
    part = map_tensors(lambda tensor: tensor.to(device), samples.rows(chosen))
    trial.seed_forward(chosen)
    return samples.task.loss(parallel, part)
