"""The learning rate of a step: a function of the step alone."""

from __future__ import annotations

import math

from shoal.train.config import OptimizerConfig

__all__ = ["learning_rate", "scaled_peak"]


def scaled_peak(config: OptimizerConfig, batch: int) -> float:
    """The highest learning rate for a batch of `batch` sequences.

    Linear: Goyal et al., arXiv:1706.02677. Square root, for Adam: Malladi et al., arXiv:2205.10287.
    """
    ratio = batch / config.reference_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scaling]
    return config.learning_rate * factor


def learning_rate(config: OptimizerConfig, *, step: int, steps: int, batch: int) -> float:
    """The learning rate of step number `step`, from 0, of `steps`.

    It grows linearly over the warm-up, reaching its peak at the first step behind it, and ends at
    `final` x peak with the last step: by half a cosine (Loshchilov and Hutter, arXiv:1608.03983), or
    constant until the last `decay` of all steps, which are linear (Hägele et al., arXiv:2405.18392).
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
