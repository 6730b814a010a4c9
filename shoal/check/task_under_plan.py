"""Trains a Task under a Plan as a user of the library does: with a loop around `shoal.parallelize`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from shoal.check.distributed import RankStep, fragment_of, gradient_of, groups_freed
from shoal.check.task_trial import TaskSamples, TaskTrial
from shoal.check.trial import CLIP, OPTIMIZER
from shoal.models import batch_normalizations, map_tensors
from shoal.parallel import Parallel, parallelize
from shoal.parallel.micro_batches import run_one_by_one
from shoal.plan import Plan, SettledPlan
from shoal.train.learning_rate import learning_rate
from shoal.train.optimizer import groups_by_decay

__all__ = ["train_task_under"]


def train_task_under(trial: TaskTrial, plan: Plan, device: torch.device) -> list[RankStep]:
    """Train as one rank of the default process group.

    Raises:
        UserError: The model cannot be laid out, or the Plan does not fit.
    """
    plan = SettledPlan.of(plan, trial.batch)
    samples = trial.samples()
    model, folder = trial.build_with_values(device), tempfile.gettempdir()
    parallel = parallelize(model, plan, device=device, offload_folder=folder)
    with groups_freed(parallel):
        return list(_steps(trial, parallel, samples, plan.microbatch, device))


def _steps(
    trial: TaskTrial, parallel: Parallel, samples: TaskSamples, microbatch: int, device: torch.device
) -> Iterator[RankStep]:
    groups = groups_by_decay(parallel.owned, OPTIMIZER.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    data = parallel.axes.data
    # Statistics of batches differ between ranks, and with shares ranks make unlike numbers of forwards.
    is_comparable = not batch_normalizations(parallel.module) and parallel.plan.shared is None
    for number in range(trial.steps):
        rate = learning_rate(OPTIMIZER, step=number, steps=trial.steps, batch=trial.batch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        own = parallel.local(torch.tensor(trial.batch_of(number))).tolist()
        micro = [own[start : start + microbatch] for start in range(0, len(own), microbatch)]
        parallel.set_micro_batches(len(micro))
        forwards = (partial(_loss, samples, chosen, parallel, device) for chosen in micro)
        total = run_one_by_one(
            forwards, len(micro), parallel.accumulate, mean_of=parallel.mean_of(len(micro))
        )
        data.all_reduce(total, "loss").wait()
        gradients = [fragment_of(owned, gradient_of(owned)) for owned in parallel.owned]
        norm = parallel.clip_gradients(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        parameters = [fragment_of(owned, owned.local) for owned in parallel.owned]
        evaluation = _evaluated(samples, micro, parallel, device) if is_comparable else None
        yield RankStep(total.item() / data.size, norm, own, gradients, parameters, evaluation)


def _evaluated(
    samples: TaskSamples, micro: Sequence[Sequence[int]], parallel: Parallel, device: torch.device
) -> float:
    """Return the mean loss of all ranks' micro-batches in evaluation."""
    parallel.module.eval()
    with torch.no_grad():
        total = torch.stack([_loss(samples, chosen, parallel, device).float() for chosen in micro]).mean()
    parallel.module.train()
    parallel.axes.data.all_reduce(total, "validation").wait()
    return total.item() / parallel.axes.data.size


def _loss(
    samples: TaskSamples, chosen: Sequence[int], parallel: Parallel, device: torch.device
) -> torch.Tensor:
    part = map_tensors(lambda tensor: tensor.to(device), samples.rows(chosen))
    return samples.task.loss(parallel, part)
