"""The compute type of parameters and inputs under precision=bf16.

The rules are FSDP2's. Weights compute in bf16 and their owners keep them in fp32. Floating inputs of the
model and of each block are cast to bf16, within tuples, mappings and dataclasses too. Buffers keep their
types. Gradients are summed in fp32. Three rules are added, for models that would otherwise stop with a type
error. A module with weights of its own casts its inputs, as a positional buffer in fp32 makes an activation
fp32. A parametrization's buffers, such as those of a spectral norm, get the type of the weight that they
make. A module with running statistics, such as a batch norm, keeps its weights in fp32 beside them, as
torch's autocast does: its input and output are bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from shoal.models.nested import map_tensors


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
