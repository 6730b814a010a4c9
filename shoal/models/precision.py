"""A module made to compute in another type, as plainly as it can be: what layouts are held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from shoal.models.nested import map_tensors

__all__ = ["SingleDevice", "cast_module"]


@final
class SingleDevice:
    """A module on one device, as the loss of a Task takes it.

    Args:
        module: The module.
        dtype: What floating inputs are cast to.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        self._dtype = dtype

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The module's output."""
        inputs, named = map_tensors(_to(self._dtype), (inputs, named))
        return self.module(*inputs, **named)


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Has an fp32 module compute in `dtype`, in place.

    A wider type, fp64, is that of all its floating parameters and buffers. A narrower one, bf16, is that of
    its parameters; buffers stay as they are, since a running mean or a rotary frequency is no longer right in
    8 bits. Batch normalization stays fp32 whole, as its kernels want. The buffers of parametrizations, such
    as those of spectral normalization, meet nothing but weights, and get the weights' type.

    Each layer with parameters casts the floating tensors among its inputs, so that what a buffer made fp32
    fits the next layer.

    Args:
        module: To be changed. Its parameters stay the same objects.
        dtype: fp32 changes nothing.
    """
    if dtype == torch.float32:
        return
    is_narrow = dtype.itemsize < torch.float32.itemsize
    beside_weights = {
        id(each)
        for parametrized in module.modules()
        if isinstance(parametrized, ParametrizationList)
        for each in parametrized.modules()
    }
    for each in module.modules():
        if is_narrow and isinstance(each, nn.modules.batchnorm._BatchNorm):
            continue
        parameters = [tensor for tensor in each.parameters(recurse=False) if tensor.is_floating_point()]
        takes_buffers = not is_narrow or id(each) in beside_weights
        buffers = [tensor for tensor in each.buffers(recurse=False) if tensor.is_floating_point()]
        for tensor in (*parameters, *(buffers if takes_buffers else ())):
            tensor.data = tensor.data.to(dtype)
        if parameters and not isinstance(each, ParametrizationList):
            each.register_forward_pre_hook(_casting(dtype), with_kwargs=True)


def _casting(dtype: torch.dtype) -> Callable[..., Any]:
    def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return map_tensors(_to(dtype), (inputs, named))

    return hook


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
