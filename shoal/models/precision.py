"""Makes a module compute in another type, in simple code: the reference for layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from shoal.models.task import map_tensors


@final
class SingleDevice:
    """A module on one device, in the form that the loss of a Task takes.

    Args:
        module: The module.
        dtype: Type that floating inputs are cast to.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        self._dtype = dtype

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the module's output."""
        inputs, named = map_tensors(_to(self._dtype), (inputs, named))
        return self.module(*inputs, **named)


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Make an fp32 module compute in `dtype`, in place.

    A wider type, fp64, applies to all floating parameters and buffers. A narrower type, bf16, applies to
    parameters only: buffers stay as they are, because a running mean or a rotary frequency is not accurate in
    8 bits. Batch normalization stays in fp32, because its kernels need that. The buffers of parametrizations,
    such as spectral normalization, are used with weights only, and get the weights' type.

    Each layer with parameters casts the floating tensors among its inputs, so that a tensor which a buffer
    made fp32 fits the next layer.

    Args:
        module: The module to change. Its parameters stay the same objects.
        dtype: Type to compute in; fp32 changes nothing.
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
