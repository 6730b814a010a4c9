"""Attention that tensor parallelism splits, and that shapes its projections for all heads of the model.

A rank has some of the heads. `view(B, T, heads, head_dim)` with the model's number of heads fails there, and
`view(B, T, heads, -1)` would silently give every head a part of its features. Where the residual stream is
split along the sequence, T of the module's input is a part of the projections' T. So the first forward of
each split module is watched: its projections may only be viewed as the rank's own heads, for each position.
The error names the module, and the view to write.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import ModelError
from shoal.models import base_layer
from shoal.parallel.tensor.tensor_layout import Split

_WRONG_SHAPES = (  # words of errors of torch, einops and Python
    "invalid for input of size",
    "must match",
    "cannot be multiplied",
    "multiply up to the size",
    "sum exactly to",
    "must divide the number of heads",
    "Expected size for first two dimensions",
    "Shape mismatch",
    "values to unpack",
)
_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}
_PARTS = {torch.ops.aten.split.Tensor, torch.ops.aten.unsafe_split.Tensor}


def watch_heads(name: str, module: nn.Module, split: Split, size: int) -> None:
    """Make a split module refuse a view of its projections as all heads of the model; call it before `split`.

    Modules of transformers write `view(B, T, -1, head_dim)`, and are left as they are.

    Args:
        name: The module's name in the model.
        module: The module.
        split: Its split.
        size: Number of ranks.
    """
    layers: dict[str, nn.Module] = {child: module.get_submodule(child) for child in split.columns}
    widths: dict[str, Any] = {child: base_layer(layer).out_features for child, layer in layers.items()}
    heads = {child: units for child, units in split.columns.items() if 1 < units < widths[child]}
    if heads and size > 1 and not type(module).__module__.startswith("transformers."):
        module.forward = _watched(module.forward, name, module, heads, size)


def _watched(
    forward: Callable[..., Any], name: str, module: nn.Module, heads: dict[str, int], size: int
) -> Callable[..., Any]:
    is_checked = False

    @wraps(forward)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal is_checked
        if is_checked or torch.compiler.is_compiling():
            return forward(*arguments, **named)
        watch = _Watch(name, size)
        hooks = [
            module.get_submodule(child).register_forward_hook(watch.hook(child, units))
            for child, units in heads.items()
        ]
        try:
            with watch:
                result = forward(*arguments, **named)
        except (RuntimeError, ValueError) as error:
            if not any(words in str(error) for words in _WRONG_SHAPES):
                raise
            child, units = next(iter(heads.items()))
            raise _refused(name, child, units, size, str(error)) from error
        finally:
            for hook in hooks:
                hook.remove()
        is_checked = True
        return result

    return call


class _Watch(TorchDispatchMode):
    """Check the views of the projections of one module."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self._name = name
        self._size = size
        self._seen: dict[int, tuple[str, int, Tensor]] = {}  # by address; the tensor keeps it in use

    def hook(self, child: str, units: int) -> Callable[..., None]:
        """Return a forward hook that notes the output of a layer with so many heads."""

        def note(layer: nn.Module, arguments: Any, output: Tensor) -> None:
            self._seen[output.untyped_storage().data_ptr()] = child, units, output

        return note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _VIEWS | _PARTS and args[0].untyped_storage().data_ptr() in self._seen:
            child, units, output = self._seen[args[0].untyped_storage().data_ptr()]
            own = max(1, units // self._size)
            if args[0].shape != output.shape:
                return result
            if func in _PARTS and result[0].shape[:-1] == output.shape[:-1] and len(result) == units > own:
                what = f"cut into {units} heads of {result[0].shape[-1]} features"
                raise _refused(self._name, child, units, self._size, what)
            if func in _VIEWS and not _keeps_heads(result.shape, output, units, own):
                raise _refused(self._name, child, units, self._size, f"viewed as {list(result.shape)}")
        return result


def _keeps_heads(shape: torch.Size, output: Tensor, units: int, own: int) -> bool:
    """Return whether a view keeps a rank's own heads, and its samples and positions, apart."""
    if len(shape) < 2:
        return True
    for first in range(len(shape) - 1, -1, -1):
        if math.prod(shape[first:]) == output.shape[-1]:
            return first == len(shape) - 1 or shape[first] != units or units == own
    return False


def _refused(name: str, child: str, units: int, size: int, what: str) -> ModelError:
    full = f"{name}.{child}" if name else child
    return ModelError(
        f"with tp={size} a rank has {max(1, units // size)} of the {units} heads of {full}, for all "
        f"positions, and the forward of {name or 'the model'} needs other shapes: {what}",
        possible="shapes that follow from the projection's output, not from the module's input or settings",
        change=f"write y = self.{child}(x), then y.view(*y.shape[:-1], -1, head_dim), with head_dim as a "
        "fixed number; and join the heads by flatten(-2)",
    )
