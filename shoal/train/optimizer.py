"""From a configuration to the optimizer of what a rank owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.errors import ConfigError, PlanError, UserError
from shoal.models import find_factory
from shoal.parallel import Parallel
from shoal.train.config import OPTIMIZERS, OptimizerConfig
from shoal.train.lion import Lion
from shoal.train.schedule import scaled_peak

__all__ = ["OptimizerFactory", "build_optimizer", "require_factories"]

OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""Called with groups of parameters, `lr` and more by name, as the classes of `torch.optim` are.

A group is `{"params": [(name, parameter), ...], "weight_decay": ...}`; torch's base class takes the names
apart and keeps them in the group as `param_names`."""

_MAKERS: Mapping[str, OptimizerFactory] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
}
assert _MAKERS.keys() == set(OPTIMIZERS)

_OF_WHOLE_MATRICES = ("adafactor",)
"""Those whose update of an element depends on the rows and columns around it."""


def build_optimizer(
    parallel: Parallel, config: OptimizerConfig, batch: int, factory: OptimizerFactory | None = None
) -> torch.optim.Optimizer:
    """The optimizer over what this rank owns.

    Args:
        parallel: The model.
        config: Names the optimizer, and gives its arguments.
        batch: Samples in an optimizer step, by which the learning rate may be scaled.
        factory: Makes it in place of what the configuration names; `config.options` are its arguments too.

    Raises:
        ConfigError: The factory raised, or gave no optimizer.
        PlanError: The optimizer needs whole matrices, and the Plan leaves a rank parts of them.
    """
    if factory is None and config.name in _OF_WHOLE_MATRICES:
        _require_whole(parallel, config.name)
    called = config.name if factory is None else getattr(factory, "__name__", repr(factory))
    arguments = {"lr": scaled_peak(config, batch), **config.options}
    if factory is None and config.name == "adamw":
        arguments = {"betas": config.betas, "eps": config.eps, "fused": True, **arguments}
    try:
        optimizer = _find(config, factory)(_groups(parallel, config.weight_decay), **arguments)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the optimizer {called} raised {type(error).__name__}: {error}",
            possible="what is called as torch.optim.SGD(groups, lr=...) is, with optimizer.options",
            change="correct optimizer.options, or the factory",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{called} gave a {type(optimizer).__name__}, which is no torch.optim.Optimizer",
            possible="a class or a function that gives an optimizer",
            change="return the optimizer from it",
        )
    return optimizer


def require_factories(config: OptimizerConfig) -> None:
    """Refuses a configuration that names what cannot be imported.

    Raises:
        ConfigError: It does.
    """
    for spec in (config.name, config.schedule):
        if ":" in spec:
            _factory(spec)


def _find(config: OptimizerConfig, factory: OptimizerFactory | None) -> OptimizerFactory:
    if factory is not None:
        return factory
    return _factory(config.name) if ":" in config.name else _MAKERS[config.name]


def _factory(spec: str) -> Callable[..., Any]:
    try:
        return find_factory(spec)
    except UserError as error:
        raise ConfigError(error.given, possible=error.possible, change=error.change) from None


def _groups(parallel: Parallel, decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which do not; a group that would be empty is left out."""

    def named(is_matrix: bool) -> Sequence[tuple[str, torch.nn.Parameter]]:
        return [
            (owned.name, owned.parameter) for owned in parallel.owned if (len(owned.shape) >= 2) is is_matrix
        ]

    groups = [
        {"params": named(True), "weight_decay": decay},
        {"params": named(False), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _require_whole(parallel: Parallel, name: str) -> None:
    """Refuses parts of matrices, of which such an optimizer would make another step than of the whole."""
    for owned in parallel.owned:
        is_part = owned.family.shard.size > 1 or owned.cut is not None
        if len(owned.shape) >= 2 and (is_part or owned.parameter.dim() < 2):
            raise PlanError(
                f"{name} needs whole matrices, and under the Plan {parallel.plan} a rank owns a part of "
                f"{owned.name}",
                possible="shard=none in fp32 without tp or ep; adamw, sgd and lion under every Plan",
                change="change the Plan, or optimizer.name",
            )
