"""Context parallelism: each rank holds a part of every sequence, and attention reaches over all parts.

All layers except attention treat each position by itself, so they need no change. Attention is replaced by
`ring_attention` or `ulysses_attention`, which communicate, and rotary embedding gets the positions that the
rank holds. A rank's activations shrink in proportion to cp. Parameters are whole on every rank. Each rank's
gradients come from its own positions: they are averaged over this axis as over the data-parallel ones.

A user's model marks where it attends and where it counts positions by attributes of its modules: the
attribute `causal_attention` of `shoal.models.transformer` is replaced by attention over ranks, and the
attribute `positions_from_zero` by the positions of the rank. Hugging Face's models are changed by other
means.

Ring attention takes any number of heads, and hides its communication behind computation if parts are long.
Ulysses sends less, all of it exposed, and needs at least as many heads as ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.models.attention import causal_attention
from shoal.models.transformer import Attention, positions_from_zero
from shoal.parallel.communication import Axis
from shoal.parallel.context.positions import POSITIONS, whole_sequence
from shoal.parallel.context.ring_attention import ring_attention
from shoal.parallel.context.ulysses import require_heads, ulysses_attention
from shoal.parallel.hugging_face.layout import has_tensor_plan
from shoal.parallel.hugging_face.sequence import (
    attend_over_ranks,
    query_heads,
    require_attention,
    require_window,
)

_ATTENTIONS: Mapping[str, Callable[..., Tensor]] = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}


def context_parallel(model: nn.Module, axis: Axis, attention: str) -> None:
    """Make the model's attention reach over the ranks of an axis, in place.

    After this the model takes each rank's part of a batch, as `local_sequence` cuts it, and all ranks of the
    axis run it together.

    Args:
        model: A module whose attention is a replaceable `causal_attention`, or Hugging Face's.
        axis: The context axis. If it has one rank, nothing changes.
        attention: "ring" or "ulysses".

    Raises:
        ModelError: The model has no such attention.
    """
    if axis.size == 1:
        return
    require_context(model, axis.size, attention)
    attend: Any = partial(_ATTENTIONS[attention], axis=axis)
    positions: Any = partial(_positions, axis=axis, attention=attention)
    if has_tensor_plan(model):
        whole: Any = partial(whole_sequence, axis=axis, attention=attention)
        attend_over_ranks(model, axis.size, attend, positions, whole)
        return
    for module, name in _attributes(model, causal_attention):
        setattr(module, name, attend)
    for module, name in _attributes(model, positions_from_zero):
        setattr(module, name, positions)


def require_context(
    model: nn.Module, size: int, attention: str, tp: int = 1, sequence: int | None = None
) -> None:
    """Check that a model's attention can reach over `size` ranks, if each has one in `tp` of its heads.

    Args:
        model: Any module.
        size: Number of ranks of context parallelism.
        attention: "ring" or "ulysses".
        tp: Number of ranks that the heads are split over.
        sequence: Tokens in a sequence, if known.

    Raises:
        ModelError: The model has no such attention.
        PlanError: It has too few heads, or does not see the whole sequence.
    """
    if size == 1:
        return
    if has_tensor_plan(model):
        require_attention(model)
        if sequence is not None:
            require_window(model.config, sequence)
        heads = [query_heads(model)]
    else:
        if not list(_attributes(model, causal_attention)):
            raise ModelError(
                f"cp={size} was given, but {type(model).__name__} has no attention that works across ranks",
                possible="Hugging Face models, and models whose attention modules call an attribute that is "
                "causal_attention of shoal.models.transformer",
                change="set self.attend = causal_attention and call it in place of "
                "scaled_dot_product_attention, and self.positions = positions_from_zero for positions; "
                "or leave out cp",
            )
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        heads = [layer.query.out_features // layer.head_dim for layer in layers]
    for number in heads if attention == "ulysses" else ():
        require_heads(number // tp, size)


def _attributes(model: nn.Module, function: Callable[..., Tensor]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the module and the name of each attribute that is this function."""
    for module in model.modules():
        yield from ((module, name) for name, value in list(vars(module).items()) if value is function)


def _positions(part: int, device: torch.device, *, axis: Axis, attention: str) -> Tensor:
    """Return the positions of this rank, which holds `part` of them."""
    return POSITIONS[attention](part * axis.size, axis.size, axis.index, device)
