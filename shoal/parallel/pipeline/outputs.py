"""The output of a model, from the rank of a pipeline's last stage to all of its ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.models import logits_of
from shoal.models.task import map_children
from shoal.parallel.communication import Axis
from shoal.values import decode, encode

_OF_ALL_BLOCKS = ("hidden_states", "attentions", "cross_attentions", "past_key_values", "router_logits")
"""Entries in the outputs of transformers that hold something of every block."""


@final
class _OfOtherStages(Sequence[Any]):
    """Stands for an entry that holds something of every block: only that of the last block can be read.

    Args:
        name: The entry.
        own: What the last stage has of it.
    """

    def __init__(self, name: str, own: Any) -> None:
        self._name = name
        self._own = own

    def __getitem__(self, index: Any) -> Any:
        """Return the last element; raise a ModelError for others."""
        if index == -1 and isinstance(self._own, tuple) and self._own:
            return self._own[-1]
        raise self.error()

    def __len__(self) -> NoReturn:
        raise self.error()

    def error(self) -> ModelError:
        """Return the error that names the entry."""
        return ModelError(
            f"the output of the model has {self._name}, of which a stage knows only its own blocks'",
            possible=f"outputs of the last stage; within a loss also {self._name}[-1]",
            change=f"leave out {self._name}, such as by use_cache=False; or use pp=1",
        )


def without_other_stages(output: Any, *, has_routers: bool) -> Any:
    """Return the last stage's output, in which reading what transformers collects of all blocks is an error.

    Args:
        output: The output; it is changed in place.
        has_routers: Whether it has the logits of all routers nevertheless.
    """
    if any(kind.__module__.startswith("transformers.") for kind in type(output).__mro__):
        for name in _OF_ALL_BLOCKS:
            value = getattr(output, name, None)
            if value is not None and not (has_routers and name == "router_logits"):
                setattr(output, name, _OfOtherStages(name, value))
    return output


def broadcast_output(output: Any, holder: int, axis: Axis, device: torch.device) -> Any:
    """Return one rank's output on every rank of an axis, which all call it.

    Args:
        output: On the rank that has it, tensors in any nesting of dicts, lists, tuples and dataclasses, or an
            object with such attributes; None on other ranks. Logits that are split, or made later, become a
            tensor.
        holder: Index along the axis of the rank that has it.
        axis: The ranks.
        device: Device of the tensors.

    Raises:
        ModelError: The output holds something of every block, or something that cannot be sent.
    """
    tensors: list[Tensor] = []
    message = b""
    if axis.index == holder:
        try:
            message = encode((_described_output(output, tensors), ""))
        except ModelError as error:
            message = encode((None, error.given))
        except TypeError as error:
            message = encode((None, f"the output of the model cannot be sent to other ranks: {error}"))
    length = torch.tensor([len(message)], dtype=torch.int64, device=device)
    axis.broadcast(length, "form", source=holder).wait()
    sent = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(int(length))
    sent = sent.to(device=device, dtype=torch.uint8)
    axis.broadcast(sent, "form", source=holder).wait()
    form, problem = decode(sent.cpu().numpy().tobytes())
    if problem:
        raise ModelError(
            problem,
            possible="in a pipeline, outputs of the last stage: tensors in dicts, lists, tuples, dataclasses",
            change="leave it out of the output, such as by use_cache=False; or use pp=1",
        )
    given = iter(tensors)

    def received(shape: list[int], dtype: str) -> Tensor:
        new = partial(torch.empty, shape, dtype=getattr(torch, dtype), device=device)
        tensor = next(given).detach().to(device).contiguous() if axis.index == holder else new()
        if tensor.numel():  # as bytes, so that any type can be sent
            axis.broadcast(tensor.view(-1).view(torch.uint8), "output", source=holder).wait()
        return tensor

    return _made(form, received)


def _described_output(output: Any, tensors: list[Tensor]) -> Any:
    """Return `_described` of an output, which may also be an object of the model's own class."""
    try:
        return _described(output, tensors)
    except TypeError:
        if not hasattr(output, "__dict__") or isinstance(output, type | nn.Module):
            raise
    tensors.clear()
    return (
        "fields",
        _name_of(output),
        [(name, _described(each, tensors)) for name, each in vars(output).items()],
    )


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Return what `_made` makes a value of, and add its tensors to a list.

    Raises:
        TypeError: It holds something else than tensors, plain values, arrays, and containers of these.
        ModelError: It holds something of every block.
    """
    if isinstance(value, _OfOtherStages):
        raise value.error()
    if hasattr(value, "token_loss"):
        value = logits_of(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", list(value.shape), str(value.dtype).removeprefix("torch.")
    kind = _name_of(value)
    if isinstance(value, Mapping):
        return "mapping", kind, [(key, _described(each, tensors)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return "sequence", kind, [_described(each, tensors) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return "fields", kind, [(name, _described(each, tensors)) for name, each in held.items()]
    if value is None or isinstance(value, bool | int | float | str | set | frozenset | range | np.ndarray):
        return "plain", value, None
    raise TypeError(f"it holds a {type(value).__name__}")


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _made(form: Any, receive: Callable[[list[int], str], Tensor]) -> Any:
    """Return a value as `_described` described it; its tensors are received in order."""
    way, first, second = form
    if way == "tensor":
        return receive(first, second)
    if way == "plain":
        return first
    kind = _class_of(first)
    if way == "sequence":
        parts = [_made(each, receive) for each in second]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    items = {name: _made(each, receive) for name, each in second}
    if way == "mapping":
        if issubclass(kind, defaultdict):
            return kind(None, items)
        has_fields = dataclasses.is_dataclass(kind)  # as the outputs of transformers
        return kind(**items) if has_fields else kind(items)
    result = object.__new__(kind)
    for name, each in items.items():
        object.__setattr__(result, name, each)  # works for a frozen object too
    return result


def _class_of(name: str) -> Any:
    """Return a container or dataclass that this process has imported.

    Raises:
        ModelError: There is none.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        return found
    raise ModelError(
        f"the output of the model holds a {name}, which this rank does not know",
        possible="dicts, lists, tuples, dataclasses and classes of modules that all ranks import",
        change="return a dict of tensors, or use pp=1",
    )


def plain_output(output: Any) -> Any:
    """Return the output with a tensor in place of logits that are split, or made later."""
    return logits_of(output) if hasattr(output, "token_loss") else map_children(plain_output, output)
