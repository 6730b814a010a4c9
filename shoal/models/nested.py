"""Tensors within mappings, sequences and dataclasses, such as batches and outputs of models."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from shoal.errors import ModelError

__all__ = ["map_children", "map_tensors", "refuse_hidden", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor of a structure, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def refuse_hidden(value: Any, function: str) -> None:
    """Check that a value in a batch is not an object with tensors that `function` would leave uncut.

    Raises:
        ModelError: It has tensors in its attributes, which `map_children` does not change.
    """
    is_seen = isinstance(value, torch.Tensor | Mapping | list | tuple) or dataclasses.is_dataclass(value)
    if is_seen or isinstance(value, type | torch.nn.Module):
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
    if isinstance(value, Mapping):
        items = {key: change(each) for key, each in value.items()}
        if all(items[key] is each for key, each in value.items()):
            return value
        return items if type(value) is dict else _with_items(value, items)
    if isinstance(value, list | tuple):
        parts = [change(each) for each in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, change)
    return value


def _with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    result = copy.copy(value)
    for key, each in items.items():
        result[key] = each
    return result


def _with_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    held = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    changed = {name: change(each) for name, each in held.items()}
    if all(changed[name] is each for name, each in held.items()):
        return value
    result = copy.copy(value)
    for name, each in changed.items():
        object.__setattr__(result, name, each)  # works for a frozen object too
    return result
