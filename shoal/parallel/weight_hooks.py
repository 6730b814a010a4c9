"""Detect every use of a model's weights, from any code.

A module's parameters are normally used in its own forward, which its parent's forward calls. But a forward
may also call the children of a block and not the block, read the weight of another module, or be a method
that is not `forward`. So the hook that must run before a weight is used belongs to the module that owns the
weight: it runs when the module is called, and when one of its parameters is read as an attribute or listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shoal.errors import LayoutError

_LAID_OUT = "_shoal_laid_out"


def between_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that torch.compile runs as it is: a compiled graph ends before it."""
    result: Callable[..., Any] = torch.compiler.disable(hook)
    return result


def outside_graphs(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that compiled code leaves out, for modules within a block: the block's own hook runs."""

    def unless_compiled(*arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*arguments)

    return unless_compiled


class _Watched(dict[str, Any]):
    """A module's parameters by name; calls `before` before one of them is read."""

    def __init__(
        self, parameters: dict[str, Any], before: Callable[[], object], is_forward_open: Callable[[], bool]
    ) -> None:
        super().__init__(parameters)
        self._before = before
        self._is_forward_open = is_forward_open

    def __getitem__(self, name: str) -> Any:
        if not torch.compiler.is_compiling():
            self._before()
        return super().__getitem__(name)

    def items(self) -> Any:
        """Return the parameters with their names."""
        self._before_list()
        return super().items()

    def values(self) -> Any:
        """Return the parameters."""
        self._before_list()
        return super().values()

    def _before_list(self) -> None:
        # A loss may list them to add a penalty; code that lists them outside a forward reads names and sizes.
        if self._is_forward_open():
            self._before()


def require_no_gradient_transform() -> None:
    """Check that weights are not gathered within `torch.func.grad` or another transform that differentiates.

    Raises:
        LayoutError: They would be: the transform would follow the communication, and end the process.
    """
    transforms = torch._C._functorch.get_interpreter_stack() or []
    if any(each.key() != torch._C._functorch.TransformType.Vmap for each in transforms):
        raise LayoutError(
            "the model was called within torch.func.grad, jacrev, jvp or the like, and its weights come from "
            "several ranks during the call",
            possible="backward() and torch.autograd.grad with respect to inputs; shard=none, zero1 or zero2; "
            "functional_call of a plain copy of the model with clones of weights made within gathered()",
            change="use one of these",
        )


def watch(module: nn.Module, before: Callable[[], object], is_forward_open: Callable[[], bool]) -> None:
    """Call `before` before each use of the module's own parameters; its children need their own call.

    Some modules, such as recurrent layers, keep references to their parameters; for these use `watch_calls`.

    Args:
        module: The module that owns the parameters.
        before: Called when one of its parameters is read, or they are listed.
        is_forward_open: Whether a forward runs, or has run since the last backward: only then is listing them
            a use.
    """
    module._parameters = _Watched(module._parameters, before, is_forward_open)


def watch_calls(module: nn.Module, before: Callable[[], object]) -> None:
    """Call `before` before each forward of a module."""

    def come(module: nn.Module, arguments: Any) -> None:
        before()

    module.register_forward_pre_hook(come)


def answer_as_model(module: nn.Module, gradients: Mapping[nn.Parameter, Callable[[None], None]]) -> None:
    """Make `zero_grad()` of a module and of its children forget owners' gradients, and refuse casts.

    Args:
        module: The module.
        gradients: Sets the gradient of the owner of each trained parameter of the module.
    """

    def zero_grad(each: nn.Module, set_to_none: bool = True) -> None:
        for parameter in each.parameters():
            if parameter in gradients:
                gradients[parameter](None)

    def apply(
        each: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        for tensor in (*each.parameters(recurse), *each.buffers(recurse)):
            changed = change(sample := tensor.new_empty(0))
            if (changed.dtype, changed.device) != (sample.dtype, sample.device):
                raise LayoutError(
                    f"a {type(each).__name__} of a model that is laid over ranks would get another type or "
                    "device",
                    possible="a move before shoal.parallelize; for bf16, precision=bf16 in the Plan",
                    change="move or cast the model before shoal.parallelize",
                )
        return each

    for each in module.modules():
        setattr(each, "zero_grad", partial(zero_grad, each))  # noqa: B010, which types of modules do not know
        setattr(each, "_apply", partial(apply, each))  # noqa: B010


def mark_laid_out(module: nn.Module) -> None:
    """Mark a model and its parts as laid over ranks: they are not laid out again, and get no parameters."""
    for each in module.modules():
        if next(each.parameters(), None) is not None:
            setattr(each, _LAID_OUT, id(each))  # a copy of the module is not laid out
    for parameter in module.parameters():
        setattr(parameter, _LAID_OUT, id(parameter))


def is_laid_out(module: nn.Module) -> bool:
    """Return whether a module was marked by `mark_laid_out`."""
    return module.__dict__.get(_LAID_OUT) == id(module)


def _refuse_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Refuse a parameter that a module gets after it was laid over ranks: no rank would own it."""
    before = dict.get(module._parameters, name)
    if parameter is None or parameter is before or not is_laid_out(module):
        return
    if before is not None or _is_new(parameter):
        raise _unowned(module, name)


def _refuse_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuse a child with such parameters."""
    if child is None or not is_laid_out(module):
        return
    if any(map(_is_new, child.parameters())):
        raise _unowned(module, name)
    if isinstance(child, (nn.ModuleDict, nn.ModuleList, nn.Sequential)):  # it may get children
        setattr(child, _LAID_OUT, id(child))


def _is_new(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and getattr(parameter, _LAID_OUT, None) != id(parameter)


def _unowned(module: nn.Module, name: str) -> LayoutError:
    return LayoutError(
        f"{name} of a {type(module).__name__} is new, and its model is laid over ranks, which would neither "
        "average its gradients nor save it",
        possible="changes before shoal.parallelize; later, values that are written within gathered(), or "
        "load_state_dict() of the object from shoal.parallelize",
        change="change the model first, then lay it over ranks",
    )


def refuse_copies(module: nn.Module, stale: Callable[[], str | None]) -> None:
    """Refuse copies, pickles and `load_state_dict` of a module, and `state_dict` while its weights are stale.

    Args:
        module: The module; its children that hold tensors are included.
        stale: Gives the reason why the weights differ from their owners'; None if they do not.
    """

    def refuse(_: object) -> NoReturn:
        raise LayoutError(
            "the model cannot be copied or pickled: its weights come from several ranks",
            possible="for an average, clones of named_parameters(); for a whole model, full_state_dict()",
            change="call one of these on the object that shoal.parallelize returned",
        )

    def before_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        reason = stale()
        if reason is not None:
            raise LayoutError(
                f"state_dict() was called on the model itself, whose weights {reason}",
                possible="on the object that shoal.parallelize returned: state_dict() for this rank's part, "
                "full_state_dict() for the whole model on rank 0, or module.state_dict() within gathered()",
                change="call one of these",
            )

    def before_load(*_: Any) -> None:
        raise LayoutError(
            "a state was loaded into the model itself and would be lost: ranks get weights from their owners",
            possible="load_state_dict() or load_full_state_dict() of the object from shoal.parallelize",
            change="call one of these",
        )

    for each in module.modules():
        if next(itertools.chain(each.parameters(), each.buffers()), None) is None:
            continue  # it holds nothing, and several models may share it
        for method in ("__deepcopy__", "__reduce_ex__"):
            setattr(each, method, refuse)
        each.register_state_dict_pre_hook(before_state)
        each.register_load_state_dict_pre_hook(before_load)


register_module_parameter_registration_hook(_refuse_parameter)
register_module_module_registration_hook(_refuse_module)
