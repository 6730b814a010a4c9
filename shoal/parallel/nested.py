"""Tensors within what a module takes and gives: tuples, lists, mappings and dataclasses of them, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with every tensor replaced by what `change` gives; itself, if that is always the tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, {key: map_tensors(each, change) for key, each in value.items()})
    if isinstance(value, list | tuple):
        parts = [map_tensors(each, change) for each in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: map_tensors(each, change) for name, each in fields.items()}
        if all(changed[name] is each for name, each in fields.items()):
            return value
        result = copy.copy(value)
        for name, each in changed.items():
            object.__setattr__(result, name, each)  # also of a frozen one
        return result
    return value


def _rebuilt_mapping(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    if all(changed[key] is each for key, each in value.items()):
        return value
    if type(value) is dict:
        return changed
    result: Any = copy.copy(value)
    for key, each in changed.items():
        result[key] = each
    return result
