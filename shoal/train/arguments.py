"""Arguments that people give to the Trainer and to their own calls, checked before they are used."""

from __future__ import annotations

from typing import Any

from shoal.errors import ConfigError, LayoutError
from shoal.parallel import Parallel, require_trainable
from shoal.train.config import OptimizerConfig


def require_arguments(model: Any, steps: Any, loss: Any, optimizer: Any) -> None:
    """Check arguments of the Trainer.

    Raises:
        ModelError: The model cannot be trained.
        LayoutError: The model is laid over ranks already.
        ConfigError: One cannot be used.
    """
    require_trainable(model)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(
            f"steps={steps!r} was given",
            possible="a whole number of at least 1",
            change="give the number of optimizer steps of the whole training",
        )
    if loss is not None and not callable(loss):
        raise ConfigError(
            f"loss={loss!r} was given, which cannot be called",
            possible="a function of the output and the targets, such as torch.nn.functional.mse_loss",
            change="give the function itself",
        )
    if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
        raise ConfigError(
            f"a {type(optimizer).__name__} was given as the optimizer",
            possible="shoal.train.OptimizerConfig(name=..., learning_rate=...); or shoal.train.Optimization("
            "config, make=...) with a class such as torch.optim.SGD, or a function with its arguments",
            change="give one of these: the Trainer makes the optimizer after it has laid out the model",
        )


def require_laid_out(parallel: Any, optimizer: Any, step: Any = None) -> None:
    """Check arguments of `shoal.save` and `shoal.load`.

    Raises:
        LayoutError: The model is not laid over ranks, or the optimizer has none of its parameters.
        ConfigError: The optimizer is none, or the step is no number of steps.
    """
    if not isinstance(parallel, Parallel):
        raise LayoutError(
            f"a {type(parallel).__name__} was given as the model, which is not laid over ranks",
            possible="what shoal.parallelize returned, also with the Plan dp=1 on one process",
            change="call shoal.parallelize on the model first",
        )
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ConfigError(
            f"step={step!r} was given", possible="a whole number of at least 0", change="give the steps made"
        )
    if optimizer is None:
        return
    if not hasattr(optimizer, "param_groups"):
        shown = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ConfigError(
            f"{shown} was given as the optimizer, which has no groups of parameters",
            possible="an optimizer of the model's parameters()",
            change="give the optimizer itself",
        )
    given = {each for group in optimizer.param_groups for each in group["params"]}
    is_plain = type(optimizer).__module__.startswith("torch.optim")  # others may wrap the parameters
    if is_plain and parallel.owned and given.isdisjoint(owned.parameter for owned in parallel.owned):
        raise LayoutError(
            f"{type(optimizer).__name__} has none of the model's parameters",
            possible="an optimizer of parameters() of the object that shoal.parallelize returned",
            change="make the optimizer after shoal.parallelize, from its parameters()",
        )
