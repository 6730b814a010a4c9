"""The learning rate of a step: a function of the step alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist

from shoal.models import find_factory
from shoal.train.config import OptimizerConfig

Schedule = Callable[[int], float]
"""A function from the number of a step, from 0, to the share of the highest learning rate."""


def scaled_peak(config: OptimizerConfig, batch: int) -> float:
    """Return the highest learning rate for a batch of `batch` sequences.

    Linear: Goyal et al., arXiv:1706.02677. Square root, for Adam: Malladi et al., arXiv:2205.10287.
    """
    ratio = batch / config.reference_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scaling]
    return config.learning_rate * factor


def learning_rate(config: OptimizerConfig, *, step: int, steps: int, batch: int) -> float:
    """Return the learning rate of step number `step`, from 0, of `steps`, under a named schedule.

    It grows linearly over the warm-up, reaches its peak at the first step after it, and ends at `final` x
    peak with the last step. Between, it falls by half a cosine (Loshchilov and Hutter, arXiv:1608.03983), or
    stays constant until the last `decay` of all steps and then falls linearly (Hägele et al.,
    arXiv:2405.18392).
    """
    peak = scaled_peak(config, batch)
    if step < config.warmup:
        return peak * (step + 1) / (config.warmup + 1)
    last = steps - 1
    if config.schedule == "cosine":
        begin = config.warmup
    else:
        begin = max(config.warmup, round(last - config.decay * steps))
    progress = min(1.0, max(0.0, (step - begin) / max(1, last - begin)))
    if config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - progress
    return peak * (config.final + (1.0 - config.final) * share)


@final
class RateCourse:
    """Set the learning rates of an optimizer's groups, step by step.

    A group with a learning rate of its own from its factory keeps its ratio to the others.

    Args:
        optimizer: The optimizer as its factory made it: each group has its highest learning rate.
        config: The configuration that names the schedule.
        steps: Total number of optimizer steps.
        batch: Samples in a step.
        schedule: Schedule to use instead of the one that the configuration names.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        *,
        steps: int,
        batch: int,
        schedule: Schedule | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._config = config
        self._steps = steps
        self._batch = batch
        self._peak = scaled_peak(config, batch)
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._schedule = schedule
        text = "" if schedule is not None else _short_training(config, steps)
        if text and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(text, stacklevel=3)
        if schedule is None and ":" in config.schedule:
            named: Callable[..., Any] = find_factory(config.schedule)
            self._schedule = lambda step: named(step, steps)

    def set(self, step: int) -> float:
        """Set the learning rates of step number `step`, from 0; return the usual groups' rate."""
        if self._schedule is not None:
            rate = self._peak * float(self._schedule(step))
        else:
            rate = learning_rate(self._config, step=step, steps=self._steps, batch=self._batch)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = rate if peak == self._peak else peak * (rate / self._peak)
        return rate


def _short_training(config: OptimizerConfig, steps: int) -> str:
    """Return a warning if a training ends before its warm-up; empty if it does not."""
    if ":" in config.schedule or config.warmup < steps:
        return ""
    return (
        f"steps={steps} end within optimizer.warmup={config.warmup}: the learning rate rises to "
        f"{steps / (config.warmup + 1):.0%} of optimizer.learning_rate and never decays; set a warmup below "
        f"steps, such as {max(1, steps // 10)}"
    )
