"""The layers that multiply in a model with LoRA's adapters, for tensor parallelism.

A layer that is split by outputs gives each rank some rows of W and the same rows of B. A is whole on each
rank, and only its product, `rank` wide, is gathered or has its gradient summed. A layer that is split by
inputs gives each rank some columns of W and of A. Their products are summed apart, and B is whole on each
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shoal.errors import PlanError
from shoal.models import base_layer
from shoal.parallel.tensor.named_layers import full_name, matching_modules
from shoal.parallel.tensor.tensor_layout import Split, TensorLayout

_A, _B = "lora_A.default", "lora_B.default"


def split_layers(model: nn.Module, layout: TensorLayout) -> Iterator[tuple[str, nn.Module, Split]]:
    """Yield name, module and split like `matching_modules`, but name the layers within adapters.

    Raises:
        PlanError: A pattern matches no module, or an adapter has dropout.
    """
    for name, module, split in matching_modules(model, layout):
        children = dict(module.named_modules(remove_duplicate=False))
        adapted = {
            child: children[child]
            for child in (*split.columns, *split.rows)
            if child in children and base_layer(children[child]) is not children[child]
        }
        yield name, module, _within(split, adapted)
        for child, layer in adapted.items():
            full = full_name(name, child)
            _require_no_dropout(full, layer)
            if child in split.columns:
                yield full, layer, Split({_B: split.columns[child]}, {})
            else:
                yield full, layer, Split({}, {_A: split.rows[child]})


def _within(split: Split, adapted: Mapping[str, nn.Module]) -> Split:
    """Return the split with the names of the layers that have the weights."""

    def named(child: str) -> str:
        return f"{child}.base_layer" if child in adapted else child

    return Split(
        {named(child): units for child, units in split.columns.items()},
        {named(child): units for child, units in split.rows.items()},
        tuple(named(child) for child in split.by_part),
    )


def _require_no_dropout(name: str, layer: Any) -> None:
    for dropout in layer.lora_dropout.values():
        if isinstance(dropout, nn.Dropout) and dropout.p > 0:
            raise PlanError(
                f"the adapter of {name} has a dropout of {dropout.p}, and ranks would draw different masks",
                possible="adapters without dropout, or tp=1",
                change="set lora.dropout=0, or leave out tp",
            )
