"""Checks and notifications of optimizer steps on a model that is laid over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shoal.errors import LayoutError
from shoal.parallel.axes import Axes
from shoal.parallel.communication import Axis
from shoal.parallel.owned import NO_NORM, PART, Mark, Owned

# Marks are attributes of the tensors, so that they end with them.
_COMPUTES = "_shoal_computes"
_FIXED = "_shoal_fixed"
_CHANGED = "_shoal_changed"
_AVERAGED = "_shoal_averaged"

_OF_WHOLE_PARAMETERS = ("Adafactor", "LAMB", "LARS", "Lamb", "Muon", "SOAP", "Shampoo")
"""Names of optimizers whose update of an element depends on others of its parameter."""

_OF_ALL_PARAMETERS = (
    *("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
    *("DoG", "LBFGS", "Prodigy"),
)
"""Names of optimizers whose update of an element depends on all parameters, as by a step size for all."""

_NOT_OF_DTENSORS = {
    ("torch", "Adafactor"),
    ("torch", "Muon"),
    ("torch", "Rprop"),
    ("transformers", "Adafactor"),
}
"""Packages and names of optimizers that fail with some DTensors, because of limits or errors of their own."""


def follow_optimizers(
    module: nn.Module,
    owned: Sequence[Owned],
    fixed: Iterable[tuple[str, nn.Parameter]],
    changed: Callable[[], None],
    axes: Axes,
) -> None:
    """Refuse steps that would train nothing or train wrongly, and report all other steps.

    A step is refused if the optimizer was made before its model was laid out, or if it needs whole
    parameters, or all of them, and has only a part. An optimizer that decides by the loss gets the mean over
    ranks, of which its gradients are those.

    Args:
        module: The model.
        owned: The parameters that optimizers may change.
        fixed: The parameters that were not trained when the model was laid out, with their names.
        changed: Called after a step of an optimizer that has some of `owned`; a bound method, not kept alive.
        axes: The axes of the Plan.
    """
    given = {each.parameter for each in owned}
    for name, parameter in module.named_parameters():
        if parameter not in given:
            setattr(parameter, _COMPUTES, name)
    for name, parameter in fixed:
        setattr(parameter, _FIXED, name)
    called: Mark[Callable[[], None]] = Mark(weakref.WeakMethod(changed))  # type: ignore[arg-type]
    averaged = Mark(lambda: axes.averaged)
    for each in owned:
        setattr(each.parameter, _CHANGED, called)
        setattr(each.parameter, _AVERAGED, averaged)
        setattr(each.parameter, PART, _part_of(each))


def _part_of(owned: Owned) -> tuple[str, str]:
    """Return which part of the parameter the optimizer has, and the parameter's name."""
    if owned.cut is not None:
        return "a block", owned.name
    return ("rows" if owned.family.shard.size > 1 else ""), owned.name


def _names_of(optimizer: Optimizer) -> set[str]:
    return {kind.__name__ for kind in type(optimizer).__mro__}


def _require_whole(optimizer: Optimizer) -> None:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(optimizer).__mro__}
    takes_blocks = _names_of(optimizer).isdisjoint(_OF_WHOLE_PARAMETERS)
    fails_with_rows = not kinds.isdisjoint(_NOT_OF_DTENSORS)
    if takes_blocks and not fails_with_rows:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part, name = getattr(parameter, PART, ("", ""))
            if (part == "a block" and not takes_blocks) or (part == "rows" and fails_with_rows):
                kind = type(optimizer).__name__
                raise LayoutError(
                    f"{kind} needs whole parameters, and a rank has {part} of {name}",
                    possible="for rows, shoal.parallel.WholeParameters, which the Trainer uses for adafactor "
                    "and muon; for blocks from tp or ep, elementwise optimizers such as AdamW",
                    change="change the Plan or the optimizer"
                    if part == "a block"
                    else f"make WholeParameters(parallel, parameters, {kind}), or set optimizer.whole=true",
                )


def needs_all_parameters(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's update of an element depends on all parameters."""
    return not _names_of(optimizer).isdisjoint(_OF_ALL_PARAMETERS)


def _require_all(optimizer: Optimizer) -> None:
    """Check that an optimizer that makes one step from all parameters has all of them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (part := getattr(parameter, NO_NORM, None)) is not None:
                kind = type(optimizer).__name__
                raise LayoutError(
                    f"{kind} makes its step from all parameters together, and a rank has {part}",
                    possible="a Plan without tp, ep and pp, or an optimizer such as AdamW",
                    change="change the Plan or the optimizer",
                )


def _with_mean_loss(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step whose closure returns the mean of all ranks' losses."""
    mark: Mark[Axis] | None = getattr(optimizer.param_groups[0]["params"][0], _AVERAGED, None)
    axis = None if mark is None else mark()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None or axis is None or axis.size == 1:
        return args, kwargs

    def mean_loss() -> torch.Tensor:
        mean = torch.as_tensor(closure()).detach().clone()
        axis.all_reduce(mean, "loss").wait()
        return mean / axis.size

    return (optimizer, mean_loss), {}


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    _require_whole(optimizer)
    if needs_all_parameters(optimizer):
        _require_all(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = getattr(parameter, _FIXED, None)
            if name is not None and parameter.requires_grad:
                raise LayoutError(
                    f"{type(optimizer).__name__} has the parameter {name}, which was not trained when the "
                    "model was laid over ranks, so it gets no gradient",
                    possible="parameters that are frozen after shoal.parallelize, and released later",
                    change=f"call requires_grad_(False) on {name} after shoal.parallelize",
                )
            name = getattr(parameter, _COMPUTES, None)
            if name is not None and parameter.requires_grad:
                raise LayoutError(
                    f"{type(optimizer).__name__} has the model's own parameter {name}, which is only for "
                    "compute: it gets no gradient, and values written to it are lost",
                    possible="an optimizer of parameters() of the object that shoal.parallelize returned",
                    change="make the optimizer after shoal.parallelize, from its parameters()",
                )
    return _with_mean_loss(optimizer, args, kwargs) if "LBFGS" in _names_of(optimizer) else None


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    told = {
        method
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (method := getattr(parameter, _CHANGED, None)) is not None
    }
    for method in told:
        changed = method()
        if changed is not None:
            changed()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
