"""Context parallelism: each rank holds a part of every sequence, and attention reaches over all parts.

All layers but attention treat each position by itself, so they need nothing. Attention is replaced by
`ring_attention` or `ulysses_attention`, which communicate, and rotary embedding is told which positions the
rank holds. Activations of a rank fall with cp. Parameters are whole on every rank, and each rank's gradients
are those of its positions: they are averaged over this axis as over the data-parallel ones.

Ring attention takes any number of heads, and hides its communication behind the computation if parts are
long; Ulysses sends less, all of it exposed, and wants at least as many heads as ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.models.transformer import Attention, Rotary
from shoal.parallel.communication import Axis
from shoal.parallel.positions import POSITIONS
from shoal.parallel.ring_attention import ring_attention
from shoal.parallel.ulysses import require_heads, ulysses_attention

__all__ = ["context_parallel", "require_context"]

_ATTENTIONS: Mapping[str, Callable[..., Tensor]] = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}


def context_parallel(model: nn.Module, axis: Axis, attention: str) -> None:
    """Has the model's attention reach over the ranks of an axis, in place.

    From then on the model takes each rank's part of a batch, as `local_sequence` cuts it, and all ranks of
    the axis run it together.

    Args:
        model: A module whose attention is made of `shoal.models.Attention`.
        axis: The context axis. If it has one rank, nothing changes.
        attention: "ring" or "ulysses".

    Raises:
        ModelError: The model has no such attention.
    """
    if axis.size == 1:
        return
    require_context(model, axis.size, attention)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = partial(_ATTENTIONS[attention], axis=axis)
        if isinstance(module, Rotary):
            module.positions = partial(_positions, axis=axis, attention=attention)


def require_context(model: nn.Module, size: int, attention: str, tp: int = 1) -> None:
    """Checks that a model's attention can reach over `size` ranks, where each has one in `tp` of its heads.

    Raises:
        ModelError: The model has no such attention.
        PlanError: It has too few heads.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if size > 1 and not layers:
        raise ModelError(
            f"cp={size} was given, but {type(model).__name__} has no attention that reaches over ranks",
            possible="models whose attention is made of shoal.models.transformer.Attention",
            change="build the model with it, or leave out cp",
        )
    for layer in layers if attention == "ulysses" else ():
        require_heads(layer.query.out_features // layer.head_dim // tp, size)


def _positions(part: int, device: torch.device, *, axis: Axis, attention: str) -> Tensor:
    """The positions of this rank, which holds `part` of them."""
    return POSITIONS[attention](part * axis.size, axis.size, axis.index, device)
