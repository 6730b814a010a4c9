"""A model with any inputs, together with the batches and the loss that train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.models.nested import map_tensors, tensors_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model whose inputs are not plain tokens, with its batches and its loss.

    Attributes:
        build: Function that returns the module, in fp32 on the CPU, with the values that training starts
            from. After the same `torch.manual_seed` they are the same.
        batch: Function from a number to the batch of that number: tensors with samples along dim 0, alone or
            in any nesting of dicts, lists, tuples and dataclasses. The same number gives the same batch.
        loss: Function from a model and a batch, or rows of a batch, to the mean loss over its samples, a
            scalar. Call the model like the module; its attribute `module` is the module itself.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], torch.Tensor]


def rows(batch: Any, start: int, stop: int) -> Any:
    """Return the samples `start` to `stop` of a batch."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def sample_count(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor's dim 0; 0 without one."""
    return next((len(tensor) if tensor.ndim else 0 for tensor in tensors_in(batch)), 0)


def batch_normalizations(module: nn.Module) -> list[str]:
    """Return the names of the layers of batch normalization, which keep running statistics."""
    kind = nn.modules.batchnorm._BatchNorm
    return [name for name, each in module.named_modules() if isinstance(each, kind)]
