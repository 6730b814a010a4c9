"""The output of a model, from the rank of a pipeline's last stage to all of its ranks."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ModelError
from shoal.models import logits_of
from shoal.parallel.communication import Axis
from shoal.values import decode, encode

__all__ = ["broadcast_output", "plain_output"]

_OF_ALL_BLOCKS = ("hidden_states", "attentions", "cross_attentions", "past_key_values", "router_logits")
"""Entries in the outputs of transformers that hold something of every block."""


def broadcast_output(output: Any, holder: int, axis: Axis, device: torch.device) -> Any:
    """Return one rank's output on every rank of an axis, which all call it.

    Args:
        output: On the rank that has it, tensors in any nesting of dicts, lists, tuples and dataclasses; None
            on other ranks. Logits that are split, or made later, become a tensor.
        holder: Index along the axis of the rank that has it.
        axis: The ranks.
        device: Device of the tensors.

    Raises:
        ModelError: The output holds something of every block, or something that cannot be sent.
    """
    tensors: list[Tensor] = []
    message = b""
    if axis.index == holder:
        problem = _problem(output)
        try:
            message = encode((None if problem else _described(plain_output(output), tensors), problem))
        except TypeError as error:
            message = encode((None, f"cannot be sent to other ranks: {error}"))
    length = torch.tensor([len(message)], dtype=torch.int64, device=device)
    axis.broadcast(length, "form", source=holder).wait()
    sent = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(int(length))
    sent = sent.to(device=device, dtype=torch.uint8)
    axis.broadcast(sent, "form", source=holder).wait()
    form, problem = decode(sent.cpu().numpy().tobytes())
    if problem:
        raise ModelError(
            f"the output of the model {problem}",
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


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Return what `_made` makes a value of, and add its tensors to a list.

    Raises:
        TypeError: It holds something else than tensors, numbers and text in containers and dataclasses.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", list(value.shape), str(value.dtype).removeprefix("torch.")
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    if isinstance(value, Mapping):
        return "mapping", kind, [(key, _described(each, tensors)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return "sequence", kind, [_described(each, tensors) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return "fields", kind, [(name, _described(each, tensors)) for name, each in held.items()]
    if value is None or isinstance(value, bool | int | float | str):
        return "plain", value, None
    raise TypeError(f"it holds a {type(value).__name__}")


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
    is_class = isinstance(found, type)
    if is_class and (issubclass(found, Mapping | list | tuple) or dataclasses.is_dataclass(found)):
        return found
    raise ModelError(
        f"the output of the model holds a {name}, which this rank does not know",
        possible="dicts, lists, tuples and dataclasses of modules that all ranks import",
        change="return a dict of tensors, or use pp=1",
    )


def _problem(output: Any) -> str:
    """Return why an output cannot be given to all ranks; empty if it can."""
    held = [name for name in _OF_ALL_BLOCKS if getattr(output, name, None) is not None]
    return f"has {', '.join(held)}, of which a stage knows only its own blocks'" if held else ""


def plain_output(output: Any) -> Any:
    """Return the output with a tensor in place of logits that are split, or made later."""
    if hasattr(output, "token_loss"):
        return logits_of(output)
    if isinstance(output, Mapping):
        logits = output.get("logits")
        return output if logits is None else _with_logits(output, plain_output(logits))
    is_container = isinstance(output, Tensor | list | tuple) or dataclasses.is_dataclass(output)
    return logits_of(output) if hasattr(output, "logits") and not is_container else output


def _with_logits(output: Mapping[str, Any], logits: Any) -> Any:
    if output["logits"] is logits:
        return output
    changed: Any = copy.copy(output)
    changed["logits"] = logits
    return changed
