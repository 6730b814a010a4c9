"""Torch's operators by kind: products, attention, and those that move no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten

PRODUCTS: frozenset[Any] = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten.convolution.default,
    }
)
ATTENTIONS: frozenset[Any] = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
EXPENSIVE: frozenset[Any] = (PRODUCTS | ATTENTIONS) - {_aten.baddbmm.default, _aten.convolution.default}
"""Operators whose results recompute=selective keeps."""

FREE: frozenset[Any] = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
"""Operators that return new memory and move no byte. Views are free as well, and known by their results."""

COPIES: frozenset[Any] = frozenset({_aten._to_copy.default, _aten.clone.default})
"""Operators that return equal values in other memory, maybe of another type."""

LOOKUPS: frozenset[Any] = frozenset(
    {
        _aten.embedding.default,
        _aten.index_select.default,
        _aten.index.Tensor,
        _aten.gather.default,
        _aten.nll_loss_forward.default,
    }
)
"""Operators that read as much of their first tensor as they write."""


class Sizes(NamedTuple):
    """Sizes of a product `[rows, inputs] x [inputs, outputs]`, or of `copies` of it that share the rows.

    Attributes:
        left: The operand that has the rows.
        right: The matrix, or matrices.
    """

    left: Tensor
    right: Tensor
    rows: int
    inputs: int
    outputs: int
    copies: int = 1


def product_of(operator: Any, arguments: Sequence[Any], result: Tensor) -> Sizes:
    """Return the sizes of one of `PRODUCTS`.

    A convolution has a row for each position of its kernel: positions in the result, or in the input if it is
    transposed.
    """
    if operator is _aten.convolution.default:
        image, kernel = arguments[0], arguments[1]
        if argument(operator, arguments, {}, "transposed"):
            channels = len(kernel)
            return Sizes(image, kernel, image.numel() // channels, channels, kernel[0].numel())
        return Sizes(image, kernel, result.numel() // len(kernel), kernel[0].numel(), len(kernel))
    added = operator in (_aten.addmm.default, _aten.baddbmm.default)
    left, right = arguments[added : added + 2]
    if operator is _aten._grouped_mm.default:
        return Sizes(left, right, left.shape[-2], left.shape[-1], right.shape[-1], len(right))
    copies = len(left) if left.ndim == 3 else 1
    return Sizes(left, right, copies * left.shape[-2], left.shape[-1], right.shape[-1], copies)


def bias_of(operator: Any, arguments: Sequence[Any]) -> Tensor | None:
    """Return the tensor that one of `PRODUCTS` adds to its result; None if there is none."""
    if operator is _aten.convolution.default:
        bias: Tensor | None = arguments[2]
        return bias
    return arguments[0] if operator in (_aten.addmm.default, _aten.baddbmm.default) else None


def argument(operator: Any, arguments: Sequence[Any], named: dict[str, Any], name: str) -> Any:
    """Return the argument with this name in a call of an operator, or its default if it is not given."""
    if name in named:
        return named[name]
    for index, each in enumerate(operator._schema.arguments):
        if each.name == name:
            return arguments[index] if index < len(arguments) else each.default_value
    raise AssertionError(f"{operator} has no argument {name}")
