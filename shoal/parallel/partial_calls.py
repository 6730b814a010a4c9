"""Refuse calls of torch that would be silently wrong on a rank's parts of a model.

`torch.nn.utils.clip_grad_norm_`, `get_total_norm` and `clip_grads_with_norm_` take the norm of the tensors
that they get: under tp, ep and pp that is the norm of one rank's part of the gradient. `torch.autograd.grad`
over parameters, and `backward(inputs=...)`, give the gradient of one rank's samples, or nothing where the
parameters that compute are others. Terms of a loss that read weights are checked there too (`loss_terms.py`).

`torch.amp.GradScaler` skips a step if a gradient that it sees is not finite. Here the ranks that hold parts
of one state tell each other.

Parameters are found by marks on tensors, which end with these. torch's own modules look up the functions
that are replaced here at each call, so it does not matter how a caller imported what it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from shoal.errors import LayoutError
from shoal.parallel.axes import Axes
from shoal.parallel.loss_terms import mark_stage, mark_summed, require_no_terms
from shoal.parallel.owned import NO_NORM, Mark, Owned, local_part

_REDUCED = "_shoal_reduced"
_PARTS = "_shoal_parts"
_INPUTS = 3  # position of `inputs` among the arguments after the outputs


def mark_parts(module: nn.Module, owned: Sequence[Owned], axes: Axes) -> None:
    """Mark the parameters of a model of which this rank has parts, or computes a part of the gradient.

    Args:
        module: The model.
        owned: This rank's parts of the trained parameters.
        axes: The axes that the model is laid over.
    """
    computing = dict(module.named_parameters())
    parts = Mark(lambda: axes.parts)
    mark_summed(computing, owned)
    if axes.pp.size > 1:
        mark_stage(computing, owned)
    for each in owned:
        setattr(each.parameter, _PARTS, parts)
        if axes.world.size > 1 or each.parameter is not computing[each.name]:
            setattr(each.parameter, _REDUCED, each.name)
            setattr(computing[each.name], _REDUCED, each.name)
        if each.cut is not None:
            setattr(each.parameter, NO_NORM, f"a block of {each.name}")
        elif each.family.shard.size > 1 and each.family.mesh is None:
            setattr(each.parameter, NO_NORM, f"rows of {each.name}")
        elif axes.pp.size > 1:
            setattr(each.parameter, NO_NORM, f"{each.name}, and no parameters of other stages")


def _require_norm(tensors: Iterable[Any]) -> None:
    for each in tensors:
        part = getattr(each, NO_NORM, None)
        if part is not None:
            raise LayoutError(
                f"torch.nn.utils takes the norm of the gradients that it gets, and this rank has {part}",
                possible="clip_gradients(limit), gradient_norm() and measure_gradient() of the object that "
                "shoal.parallelize returned: they take the norm over all ranks",
                change="call clip_gradients(limit) on all ranks",
            )


def _of_whole_norm(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        tensors = next(iter((*arguments, *named.values())))
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        _require_norm(tensors)
        if arguments:
            return function(tensors, *arguments[1:], **named)
        return function(**{**named, next(iter(named)): tensors})

    return checked


def _of_whole_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(outputs: Any, *arguments: Any, **named: Any) -> Any:
        for each in arguments[_INPUTS] if len(arguments) > _INPUTS else ():
            name = getattr(each, _REDUCED, None)
            if name is not None:
                raise LayoutError(
                    f"torch.autograd was asked for the gradient of {name} alone, which would be one rank's",
                    possible="backward(), after which .grad of parameters() has the gradient over all ranks; "
                    "torch.autograd.grad with respect to inputs and activations",
                    change="call backward() without inputs, and read .grad",
                )
        require_no_terms(outputs)
        return function(outputs, *arguments, **named)

    return checked


class _Given(NamedTuple):
    """What a GradScaler reads of an optimizer."""

    param_groups: list[dict[str, Any]]


def _with_own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter with its gradient: torch takes no DTensors beside tensors."""
    if parameter.grad is None or not hasattr(parameter, _PARTS):
        return parameter
    own = local_part(parameter).detach()
    own.grad = local_part(parameter.grad)
    return own


def _on_all_parts(unscale: Callable[..., dict[torch.device, torch.Tensor]]) -> Callable[..., Any]:
    @wraps(unscale)
    def checked(scaler: Any, optimizer: Any, *arguments: Any) -> dict[torch.device, torch.Tensor]:
        given = [each for group in optimizer.param_groups for each in group["params"]]
        parts_here = _Given([{"params": [_with_own_gradient(each) for each in given]}])
        found = unscale(scaler, parts_here, *arguments)
        # torch changes gradients there without counting it, and norms may be known from before.
        torch.autograd.graph.increment_version([each.grad for each in given if each.grad is not None])
        parts = {mark(): each.device for each in given if (mark := getattr(each, _PARTS, None)) is not None}
        for axis, device in parts.items():
            if axis is not None and axis.size > 1:
                total = sum((each.to(device) for each in found.values()), torch.zeros((), device=device))
                axis.all_reduce(total, "found_inf").wait()
                found[device] = total.clamp(max=1.0)
        return found

    return checked


def _replace(modules: Sequence[tuple[Any, str]], checked: Callable[..., Any]) -> None:
    function = checked(getattr(*modules[0]))
    for module, name in modules:
        setattr(module, name, function)


_replace([(clip_grad, "_get_total_norm"), (nn.utils, "get_total_norm")], _of_whole_norm)
_replace([(clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_")], _of_whole_norm)
_replace([(torch.autograd, "_engine_run_backward")], _of_whole_gradients)
_replace([(GradScaler, "_unscale_grads_")], _on_all_parts)
