"""The state of dynamic rotary embeddings of transformers, which no `state_dict` holds.

Such an embedding keeps frequencies for the longest sequence that it has seen since one of the original
length: a buffer that is not persistent, and two numbers beside it. A checkpoint holds them as one tensor:
the length, the scaling of attention, the frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["restore_rotary_state", "rotary_state"]

_PREFIX = "rotary."
_LENGTH, _FREQUENCIES = "max_seq_len_cached", "inv_freq"


def rotary_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of each dynamic rotary embedding of a model, by its name in a checkpoint."""
    return {name: _state_of(module, kind) for name, module, kind in _embeddings(model)}


def restore_rotary_state(model: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Restore states from `rotary_state`; embeddings that have none there begin anew."""
    for name, module, kind in _embeddings(model):
        if name in states:
            length, scaling, *frequencies = states[name].tolist()
            setattr(module, f"{kind}{_LENGTH}", int(length))
            module.attention_scaling = scaling
            before = getattr(module, f"{kind}{_FREQUENCIES}")
            # A new tensor: the buffer may be the one that keeps the original frequencies.
            module.register_buffer(f"{kind}{_FREQUENCIES}", before.new_tensor(frequencies), persistent=False)


def _embeddings(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the module and the prefix of its attributes of each dynamic embedding."""
    for name, module in model.named_modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layers = kinds.items() if isinstance(kinds, dict) else [("", kinds)]
        for layers, kind in by_layers:
            prefix = f"{layers}_" if layers else ""
            if isinstance(kind, str) and "dynamic" in kind and hasattr(module, f"{prefix}{_FREQUENCIES}"):
                yield f"{_PREFIX}{name}.{prefix}{_FREQUENCIES}", module, prefix


def _state_of(module: Any, kind: str) -> Tensor:
    length = getattr(module, f"{kind}{_LENGTH}", module.max_seq_len_cached)
    numbers = torch.tensor([float(length), float(module.attention_scaling)], dtype=torch.float64)
    return torch.cat([numbers, getattr(module, f"{kind}{_FREQUENCIES}").detach().double().cpu().flatten()])
