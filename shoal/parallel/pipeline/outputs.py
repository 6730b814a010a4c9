"""The output of a model, from the rank of a pipeline's last stage to all of its ranks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ModelError
from shoal.models import logits_of, map_tensors
from shoal.parallel.communication import Axis

__all__ = ["broadcast_output"]

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

    def described(tensor: Tensor) -> Tensor:
        tensors.append(tensor.detach().to(device).contiguous())
        return tensor.detach().to("meta")

    message = b""
    if axis.index == holder:
        problem = _problem(output)
        try:
            message = pickle.dumps((None if problem else map_tensors(described, _plain(output)), problem))
        except Exception as error:  # whatever the objects in the output raise
            message = pickle.dumps((None, f"cannot be sent to other ranks: {error}"))
    length = torch.tensor([len(message)], dtype=torch.int64, device=device)
    axis.broadcast(length, "form", source=holder).wait()
    sent = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(int(length))
    sent = sent.to(device=device, dtype=torch.uint8)
    axis.broadcast(sent, "form", source=holder).wait()
    form, problem = pickle.loads(sent.cpu().numpy().tobytes())
    if problem:
        raise ModelError(
            f"the output of the model {problem}",
            possible="in a pipeline, outputs of the last stage: tensors in dicts, lists, tuples, dataclasses",
            change="leave it out of the output, such as by use_cache=False; or use pp=1",
        )
    given = iter(tensors)

    def received(meta: Tensor) -> Tensor:
        tensor = next(given) if axis.index == holder else torch.empty_like(meta, device=device)
        if tensor.numel():  # as bytes, so that any type can be sent
            axis.broadcast(tensor.view(-1).view(torch.uint8), "output", source=holder).wait()
        return tensor

    return map_tensors(received, form)


def _problem(output: Any) -> str:
    """Return why an output cannot be given to all ranks; empty if it can."""
    held = [name for name in _OF_ALL_BLOCKS if getattr(output, name, None) is not None]
    return f"has {', '.join(held)}, of which a stage knows only its own blocks'" if held else ""


def _plain(output: Any) -> Any:
    """Return the output with a tensor in place of logits that are split, or made later."""
    if hasattr(output, "token_loss"):
        return logits_of(output)
    if isinstance(output, Mapping):
        logits = output.get("logits")
        return output if logits is None else _with_logits(output, _plain(logits))
    is_container = isinstance(output, Tensor | list | tuple) or dataclasses.is_dataclass(output)
    return logits_of(output) if hasattr(output, "logits") and not is_container else output


def _with_logits(output: Mapping[str, Any], logits: Any) -> Any:
    if output["logits"] is logits:
        return output
    changed: Any = copy.copy(output)
    changed["logits"] = logits
    return changed
