"""The training of a Task under a Plan, by the library face: a loop of one's own over `shoal.parallelize`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from shoal.check.distributed import RankStep, fragment_of, gradient_of, groups_freed
from shoal.check.task_trial import TaskSamples, TaskTrial
from shoal.check.trial import CLIP, OPTIMIZER
from shoal.models import map_tensors
from shoal.parallel import Parallel, parallelize
from shoal.plan import Plan
from shoal.train.learning_rate import learning_rate
from shoal.train.optimizer import groups_by_decay

__all__ = ["train_task_under"]


def train_task_under(trial: TaskTrial, plan: Plan, device: torch.device) -> list[RankStep]:
    """Trains as one rank of the default process group.

    Raises:
        UserError: The model cannot be laid out, or the Plan does not fit.
    """
    plan = plan.with_microbatch_for(trial.batch)
    samples = trial.samples()
    parallel = parallelize(trial.build_with_values(device), plan, device=device)
    with groups_freed(parallel):
        return list(_steps(trial, parallel, samples, device))


def _steps(
    trial: TaskTrial, parallel: Parallel, samples: TaskSamples, device: torch.device
) -> Iterator[RankStep]:
    groups = groups_by_decay(parallel.owned, OPTIMIZER.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    plan, dp, data = parallel.plan, parallel.axes.dp, parallel.axes.data
    assert plan.microbatch is not None
    size = trial.batch // dp.size
    for number in range(trial.steps):
        rate = learning_rate(OPTIMIZER, step=number, steps=trial.steps, batch=trial.batch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        own = trial.batch_of(number)[dp.index * size : (dp.index + 1) * size]
        micro = [own[start : start + plan.microbatch] for start in range(0, size, plan.microbatch)]
        parallel.set_micro_batches(len(micro))
        total = torch.zeros((), device=device)
        for place, chosen in enumerate(micro):
            part = map_tensors(lambda tensor: tensor.to(device), samples.rows(chosen))
            loss = samples.task.loss(parallel, part) / len(micro)
            total += loss.detach()
            with parallel.accumulate() if place + 1 < len(micro) else nullcontext():
                loss.backward()
        data.all_reduce(total, "loss").wait()
        gradients = [fragment_of(owned, gradient_of(owned)) for owned in parallel.owned]
        norm = parallel.clip_gradients(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        parameters = [fragment_of(owned, owned.local) for owned in parallel.owned]
        yield RankStep(total.item() / data.size, norm, own, gradients, parameters)
