"""The learning rate of a step: a function of the step alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist

from shoal.models import find_factory
from shoal.spec.run import Run
from shoal.train.config import OptimizerConfig, TrainConfig, load_config

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


_COURSE = ("learning_rate", "schedule", "warmup", "decay", "final", "scaling", "reference_batch")
_JUMP = 1.1  # a larger ratio of two rates is a jump


def rate_change_of(run: Run, described: Mapping[str, Any], now: TrainConfig, made: int) -> str:
    """Describe how the learning rate of a resumed run goes on; empty if its course is unchanged.

    Args:
        run: The run.
        described: Its description before it went on.
        now: The configuration that it goes on with.
        made: Number of steps made.
    """
    rates = {values["step"]: values.get("learning_rate") for values in run.metrics()}
    return describe_rate_change(load_config(base=described["config"]), now, made, rates.get(made))


def describe_rate_change(before: TrainConfig, now: TrainConfig, made: int, last: float | None = None) -> str:
    """Describe how the learning rate goes on, and how it could; empty if its course is unchanged.

    Args:
        before: The configuration that the run had.
        now: The configuration that it goes on with.
        made: Number of steps made.
        last: Learning rate of the last step made, if it was recorded.
    """
    if made >= now.steps:
        return ""
    changes = _changes(before, now)
    if ":" in now.optimizer.schedule or (last is None and ":" in before.optimizer.schedule):
        # The user's function is not asked: it may count its calls.
        return f"the learning rate has another course, since {' and '.join(changes)}" if changes else ""
    if last is None:
        last = _rate(before, made - 1)
    if not changes and math.isclose(last, _rate(now, made - 1), rel_tol=1e-6):
        return ""
    following = _rate(now, made)
    text = (
        f"the learning rate was {last:.3g} at step {made}, the last step made, and is {following:.3g} at "
        f"step {made + 1}"
    )
    if changes:
        text += f", since {' and '.join(changes)}"
    if max(following, last) <= _JUMP * min(following, last):
        return text
    offer = _settings_to_go_on_from(last, now, made)
    if offer is not None:
        settings, end = offer
        text += f"\n  to go on from {last:.3g} instead, and end at {end:.3g}: {settings}"
    return f"warning: {text}" if following > last else text


def _rate(config: TrainConfig, step: int) -> float:
    return learning_rate(config.optimizer, step=step, steps=config.steps, batch=config.batch)


def _changes(before: TrainConfig, now: TrainConfig) -> list[str]:
    """Return the changed settings that determine the learning rate, in words."""
    pairs = {
        f"optimizer.{name}": (getattr(before.optimizer, name), getattr(now.optimizer, name))
        for name in _COURSE
    }
    pairs["steps"] = (before.steps, now.steps)
    if now.optimizer.scaling != "none":
        pairs["batch"] = (before.batch, now.batch)
    return [f"{name} went from {old} to {new}" for name, (old, new) in pairs.items() if old != new]


def _settings_to_go_on_from(rate: float, config: TrainConfig, made: int) -> tuple[str, float] | None:
    """Return settings with `rate` as the next rate and a fall at the end, and the last rate; None if none.

    The rate stays constant up to a linear decay. By this a run can be extended again and again
    (Hägele et al., arXiv:2405.18392).
    """
    factor = scaled_peak(config.optimizer, config.batch) / config.optimizer.learning_rate
    left = config.steps - 1 - made
    decay = min(config.optimizer.decay, math.floor(1000 * left / config.steps) / 1000)
    course = {
        "learning_rate": float(f"{rate / factor:.6g}"),
        "schedule": "constant-then-decay",
        "decay": decay,
    }
    changed = OptimizerConfig.model_validate(config.optimizer.model_dump() | course)
    offered = config.model_copy(update={"optimizer": changed})
    if not math.isclose(_rate(offered, made), rate, rel_tol=0.01):
        return None
    settings = [
        f"--set optimizer.{name}={value}"
        for name, value in course.items()
        if value != getattr(config.optimizer, name)
    ]
    return " ".join(settings), _rate(offered, config.steps - 1)
