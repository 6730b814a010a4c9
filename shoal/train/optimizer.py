"""Build the optimizer of a rank's parameters from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from shoal.errors import ConfigError, UserError
from shoal.models import Transformer, find_factory
from shoal.parallel import (
    GuidedUpdates,
    LocalUpdates,
    OffloadedOptimizer,
    Owned,
    Parallel,
    TensorLayout,
    Together,
    WholeParameters,
    outer_settings,
)
from shoal.train.config import OPTIMIZERS, OptimizerConfig
from shoal.train.learning_rate import Schedule, scaled_peak


@final
class Lion(torch.optim.Optimizer):
    """Move each element by the learning rate, against the sign of an average of its gradients.

    With the gradient g and its average m: `p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)`,
    then `m = beta2 * m + (1 - beta2) * g`. It works element by element, so it takes any part of a parameter.

    Args:
        params: Parameters or groups, as torch optimizers take them.
        lr: Learning rate; three to ten times less than AdamW's, as the paper says.
        betas: Decay of the average, in the step and in the stored average.
        weight_decay: Decoupled weight decay; three to ten times AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step with the present gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held:
                self._update(held, group["lr"], group["betas"], group["weight_decay"])
        return loss

    def _update(
        self, held: list[torch.Tensor], rate: float, betas: tuple[float, float], decay: float
    ) -> None:
        for parameter in held:
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["exp_avg"] for parameter in held]
        gradients: list[Any] = [parameter.grad for parameter in held]
        signs = torch._foreach_lerp(averages, gradients, 1 - betas[0])
        torch._foreach_sign_(signs)
        torch._foreach_mul_(held, 1 - rate * decay)
        torch._foreach_add_(held, signs, alpha=-rate)
        torch._foreach_lerp_(averages, gradients, 1 - betas[1])


OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer; called like the classes of `torch.optim`, with groups of parameters, `lr` and options.

A group is `{"params": [(name, parameter), ...], "weight_decay": ...}`; torch's base class takes the names
apart and keeps them in the group as `param_names`."""


@dataclass(frozen=True, slots=True)
class Optimization:
    """An optimizer and a schedule of the user's own.

    Attributes:
        config: Names the optimizer and the schedule, and has their settings; None for the defaults.
        make: Makes the optimizer, instead of the one that `config` names; called like `torch.optim.SGD`, with
            groups of named parameters, `lr`, and the configuration's `options`.
        schedule: A schedule instead of the one that `config` names: a function from the number of a step,
            from 0, to the share of the highest learning rate.
    """

    config: OptimizerConfig | None = None
    make: OptimizerFactory | None = None
    schedule: Schedule | None = None


_MAKERS: Mapping[str, OptimizerFactory] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
    "muon": torch.optim.Muon,
}
assert _MAKERS.keys() == set(OPTIMIZERS)

_OF_WHOLE_PARAMETERS = ("adafactor", "muon")
"""Optimizers whose update of an element depends on the rows and columns around it."""


def build_optimizer(
    parallel: Parallel, config: OptimizerConfig, batch: int, factory: OptimizerFactory | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of this rank's parameters.

    Args:
        parallel: The model.
        config: Configuration that names the optimizer, and has its arguments.
        batch: Samples in an optimizer step, by which the learning rate may be scaled.
        factory: Makes the optimizer instead of the one that the configuration names; `config.options` are its
            arguments too.

    Raises:
        ConfigError: The factory raised, or did not return an optimizer.
        LayoutError: The optimizer needs whole parameters, and the Plan cuts them by tp or ep.
    """
    called = config.name if factory is None else getattr(factory, "__name__", repr(factory))
    arguments = {"lr": scaled_peak(config, batch), **config.options}
    if factory is None and config.name == "adamw":
        arguments = {**_of_adamw(config), **arguments}
    make = _find(config, factory)
    if parallel.storage is not None and parallel.plan.tiers.optimizer != "device":
        if factory is None:
            require_elementwise(config, parallel.plan.offload)
        make = partial(OffloadedOptimizer, parallel, make=make)
    if config.whole or (factory is None and config.name in _OF_WHOLE_PARAMETERS):
        make = partial(WholeParameters, parallel, make=make)
    try:
        if factory is None and config.name == "muon":
            optimizer = _muon(parallel, make, config, arguments)
        else:
            optimizer = make(groups_by_decay(parallel.owned, config.weight_decay), **arguments)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the optimizer {called} raised {type(error).__name__}: {error}",
            possible="a factory that is called like torch.optim.SGD(groups, lr=...), with optimizer.options",
            change="correct optimizer.options, or the factory",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{called} gave a {type(optimizer).__name__}, which is not a torch.optim.Optimizer",
            possible="a class or a function that returns an optimizer",
            change="return the optimizer from it",
        )
    outer, exchange = config.outer, parallel.plan.exchanged
    if exchange.merges:
        return LocalUpdates(parallel, optimizer, outer=outer_settings(exchange, **outer))
    if exchange.is_chosen and parallel.plan.replicas > 1:
        return GuidedUpdates(parallel, optimizer, **outer)
    return optimizer


def require_factories(config: OptimizerConfig) -> None:
    """Refuse a configuration that names an object which cannot be imported.

    Raises:
        ConfigError: It names one.
    """
    for spec in (config.name, config.schedule):
        if ":" in spec:
            _factory(spec)


def needs_whole_parameters(config: OptimizerConfig) -> bool:
    """Return whether an optimizer needs whole parameters, so that its Plan has no `offload`."""
    return bool(config.whole) or config.name in _OF_WHOLE_PARAMETERS


def require_elementwise(config: OptimizerConfig, offload: str) -> None:
    """Refuse an optimizer that needs whole parameters, for a Plan with this `offload`.

    Raises:
        ConfigError: It does.
    """
    if needs_whole_parameters(config):
        raise ConfigError(
            f"offload={offload} was given with the optimizer {config.name}, which needs whole parameters",
            possible="with offload, optimizers that change each element by itself, such as adamw",
            change="leave out offload, or choose another optimizer",
        )


def _find(config: OptimizerConfig, factory: OptimizerFactory | None) -> OptimizerFactory:
    if factory is not None:
        return factory
    return _factory(config.name) if ":" in config.name else _MAKERS[config.name]


def _factory(spec: str) -> Callable[..., Any]:
    try:
        return find_factory(spec)
    except UserError as error:
        raise ConfigError(error.given, possible=error.possible, change=error.change) from None


def _of_adamw(config: OptimizerConfig) -> dict[str, Any]:
    return {"betas": config.betas, "eps": config.eps, "fused": True}


def _muon(
    parallel: Parallel, make: OptimizerFactory, config: OptimizerConfig, arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return Muon for matrices, and AdamW for the rest: vectors, three dims or more, embeddings, the head.

    Both have one learning rate. By default Muon scales it so that its updates are as large as AdamW's.
    """
    others = _embeddings_and_head(parallel.module)
    is_matrix = {owned.name: len(owned.shape) == 2 and owned.name not in others for owned in parallel.owned}
    decay = config.weight_decay
    matrices = [owned for owned in parallel.owned if is_matrix[owned.name]]
    rest = [owned for owned in parallel.owned if not is_matrix[owned.name]]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(
            make(groups_by_decay(matrices, decay), **{"adjust_lr_fn": "match_rms_adamw", **arguments})
        )
    if rest:
        made.append(torch.optim.AdamW(groups_by_decay(rest, decay), lr=arguments["lr"], **_of_adamw(config)))
    return Together(made)


def _embeddings_and_head(model: nn.Module) -> frozenset[str]:
    """Return the weights of embeddings, and of the head if the model names it."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    layout = getattr(model, "tensor_layout", None)
    if isinstance(model, Transformer):
        layers.append(model.head)
    elif isinstance(layout, TensorLayout) and layout.head is not None:
        layers.append(model.get_submodule(layout.head))
    elif callable(output := getattr(model, "get_output_embeddings", None)):
        layers.append(output())
    # A pipeline stage lacks layers of the other stages.
    held = {id(weight) for layer in layers if (weight := getattr(layer, "weight", None)) is not None}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in held)


def groups_by_decay(owned: Sequence[Owned], decay: float) -> list[dict[str, Any]]:
    """Return the groups of an optimizer: matrices, which decay, and vectors, which do not; none is empty."""

    def named(is_matrix: bool) -> Sequence[tuple[str, torch.nn.Parameter]]:
        return [(each.name, each.parameter) for each in owned if (len(each.shape) >= 2) is is_matrix]

    groups = [
        {"params": named(True), "weight_decay": decay},
        {"params": named(False), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
