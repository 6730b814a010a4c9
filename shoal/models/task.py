"""A model with any inputs, together with the batches and the loss that train it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError


def children_of(value: Any) -> Mapping[Any, Any] | None:
    """Return what a dict, list, tuple or dataclass holds by key, place or field; None for other values."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor of a structure, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for each in (children_of(value) or {}).values():
        yield from tensors_in(each)


def refuse_hidden(value: Any, function: str) -> None:
    """Check that a value in a batch is not an object with tensors that `function` would leave uncut.

    Raises:
        ModelError: It has tensors in its attributes, which `map_children` does not change.
    """
    if isinstance(value, torch.Tensor | type | torch.nn.Module) or children_of(value) is not None:
        return
    slots = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    if next(tensors_in({**slots, **getattr(value, "__dict__", {})}), None) is not None:
        raise ModelError(
            f"{function}() was given a {type(value).__name__}, whose tensors it cannot cut",
            possible="tensors, alone or in dicts, lists, tuples and dataclasses",
            change=f"make {type(value).__name__} a dataclass, or give its tensors in a dict",
        )


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the structure with each tensor changed; other values stay as they are.

    Args:
        change: Function that is called with each tensor.
        value: A tensor, or dicts, lists, tuples and dataclasses of them, nested to any depth.

    Returns:
        `value` itself where `change` gives each tensor back; else a copy of the same class.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    return map_children(partial(map_tensors, change), value)


def map_children(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a dict, list, tuple or dataclass with each direct element changed; any other value as it is.

    Returns:
        `value` itself where `change` gives each element back; else a copy of the same class.
    """
    held = children_of(value) or {}
    changed = {key: change(each) for key, each in held.items()}
    if all(changed[key] is each for key, each in held.items()):
        return value
    if type(value) is dict:
        return changed
    if isinstance(value, list | tuple):
        parts = list(changed.values())
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    result = copy.copy(value)
    for key, each in changed.items():
        if isinstance(result, Mapping):
            result[key] = each  # type: ignore[index]
        else:
            object.__setattr__(result, key, each)  # works for a frozen object too
    return result


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


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward of their own


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the elements with parameters of the outermost `ModuleList`s and `Sequential`s, in order."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        parts = (
            [part] if not isinstance(part, _CONTAINERS) else find_blocks(part) for part in model.children()
        )
        return [block for blocks in parts for block in blocks if any(True for _ in block.parameters())]
    return list(itertools.chain.from_iterable(find_blocks(child) for child in model.children()))
