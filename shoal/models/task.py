"""A model together with the batches and the loss that train it, whatever its inputs are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Task", "batch_normalizations", "map_tensors", "rows", "sample_count"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What it takes to train a model whose inputs are no plain tokens.

    Attributes:
        build: Gives the module, in fp32 on the CPU, with the values that training starts from. After the same
            `torch.manual_seed` they are the same.
        batch: From a number to the batch of that number: tensors with samples along dim 0, alone or in any
            nesting of dicts, lists, tuples and dataclasses. The same number gives the same batch.
        loss: From a model and a batch, or rows of one, to the mean loss over its samples, a scalar. The model
            is called like the module; its attribute `module` is the module itself.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], torch.Tensor]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with `function` of each tensor in it; what is no tensor stays as it is.

    Args:
        function: Called with each tensor.
        value: A tensor, or dicts, lists, tuples and dataclasses of them, nested to any depth.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **map_tensors(function, held))
    if isinstance(value, Mapping):
        return {key: map_tensors(function, each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, each) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, each) for each in value)
    return value


def rows(batch: Any, start: int, stop: int) -> Any:
    """The samples `start` to `stop` of a batch."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def sample_count(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor's dim 0; 0 if there is no tensor with one."""
    lengths: list[int] = []
    map_tensors(lambda tensor: lengths.append(len(tensor) if tensor.ndim else 0), batch)
    return next(iter(lengths), 0)


def batch_normalizations(module: nn.Module) -> list[str]:
    """The names of the layers that normalize a sample by those beside it, and keep running statistics."""
    kind = nn.modules.batchnorm._BatchNorm
    return [name for name, each in module.named_modules() if isinstance(each, kind)]
