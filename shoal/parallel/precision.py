"""The compute type of parameters and inputs under precision=bf16.

The rules are FSDP2's. Weights compute in bf16 and their owners keep them in fp32. Floating inputs of the
model and of each block are cast to bf16, within tuples, mappings and dataclasses too. Buffers keep their
types. Gradients are summed in fp32. Three rules are added, for models that would otherwise stop with a type
error. A module with weights of its own casts its inputs, as a positional buffer in fp32 makes an activation
fp32. A parametrization's buffers, such as those of a spectral norm, get the type of the weight that they
make. A module with running statistics, such as a batch norm, keeps its weights in fp32 beside them, as
torch's autocast does: its input and output are bf16.

Products in 8 bits: precision=fp8, by torchao (arXiv:2209.05433 for the formats).

The layers of blocks round their operands to 8 bits before each product, with one scale for each tensor that
is computed anew in every step. Weights, sums and all other operators are as with precision=bf16. On a CPU the
rounding is emulated, so that a Plan can be tried there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from shoal.errors import PlanError
from shoal.models.task import map_tensors


def kept_in_fp32(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that compute in fp32 whatever the Plan says."""
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NormBase)
        for parameter in module.parameters(recurse=False)
    }
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in kept)


def cast_inputs(model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Cast floating inputs of the model, its blocks, and modules with weights to the type that computes.

    Args:
        model: The model; its weights may have another type when this is called.
        blocks: The model's repeated parts.
        dtype: The type that computes.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def before_any(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return map_tensors(cast, inputs), map_tensors(cast, named)

    def before_leaf(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        for each in inputs:
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dtype != dtype:
                return map_tensors(cast, inputs)
        return None

    for module in model.modules():
        if isinstance(module, ParametrizationList):
            _cast_buffers(module, dtype)
    for module in dict.fromkeys((model, *blocks)):
        module.register_forward_pre_hook(before_any, with_kwargs=True)
    for module in set(model.modules()) - {model, *blocks}:
        own = [each for each in module._parameters.values() if each is not None]
        if any(each.is_floating_point() for each in own) and not isinstance(module, _NormBase):
            module.register_forward_pre_hook(before_leaf)


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                each._buffers[name] = buffer.to(dtype)


_CAPABILITY = (8, 9)
"""CUDA's compute capability of the first devices with products in 8 bits: Ada and Hopper."""

_MULTIPLE = 16
"""Sizes of a product in 8 bits are multiples of this."""


def use_float8(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Make the linear layers of blocks compute in 8 bits, in place; their parameters stay the same objects.

    Args:
        blocks: The blocks.
        device: Device that will compute.

    Raises:
        PlanError: The device has no such products, or torchao is missing.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise PlanError(
            f"precision=fp8 was given, and {torch.cuda.get_device_name(device)} has no products in 8 bits",
            possible="fp8 on GPUs of compute capability 8.9 or higher, such as L40S, H100 and B200",
            change="use precision=bf16",
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise PlanError(
            "precision=fp8 was given, and torchao, which makes its products, is not installed",
            possible="pip install 'shoal[fp8]'",
            change="install it, or use precision=bf16",
        ) from None
    config = Float8LinearConfig(emulate=device.type == "cpu")
    for block in blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=_fits)


def _fits(module: Any, name: str) -> bool:
    if type(module) is not nn.Linear:
        return False
    return module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
