"""The documents of packed samples in Hugging Face's models.

transformers makes masks that keep documents apart out of `position_ids` that begin anew. Models that do not
pass their positions on get such masks from here, as transformers prepares them for generation. Models that
count positions from above their padding token get theirs so counted within each document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.models.task import find_blocks

REGISTERED = "shoal"
"""The name under which attention over ranks is registered with transformers."""

Masks = Callable[[Any, Tensor, Tensor], Any]
"""Gives attention masks for a configuration, the form of embeddings `[batch, seq, 0]`, and positions."""


def use_masks(model: Any, masks: str) -> None:
    """Give a model masks that keep documents apart whenever it gets `position_ids` and no mask, in place.

    Args:
        model: A model of transformers.
        masks: A name in `MASKS`.
    """
    decoder_of(model).register_forward_pre_hook(
        partial(_with_masks, model=model, masks=MASKS[masks]), with_kwargs=True
    )
    if MASKS[masks] is _both_ways:
        for module in model.modules():
            if isinstance(getattr(module, "sliding_window", None), int) and _takes(module, "attention_mask"):
                module.register_forward_pre_hook(_with_window, with_kwargs=True)


def decoder_of(model: Any) -> Any:
    """Return the module that counts positions: the innermost one around the blocks that takes them.

    The forward of a model may pass its `base_model` by.
    """
    base = model.base_model
    blocks = find_blocks(base)
    around = [
        module
        for module in base.modules()
        if _takes(module, "position_ids")
        and _takes(module, "input_ids")
        and (not blocks or any(inner is blocks[0] for inner in module.modules()))
    ]
    return around[-1] if around else base


def padding_before(model: Any) -> int | None:
    """Return the padding token above which a model begins to count positions; None if it counts from 0."""
    for module in model.modules():
        own = getattr(module, "create_position_ids_from_inputs_embeds", None)
        padding = getattr(module, "padding_idx", None)
        if own is not None and isinstance(padding, int):
            return padding
    return None


def counted_positions(tokens: Tensor, position_ids: Tensor | None, padding: int) -> Tensor:
    """Return positions as models count them that leave padding tokens out, from `padding + 1` in a document.

    Args:
        tokens: Whole samples, `[batch, seq]`.
        position_ids: Position of each token in its document, `[batch, seq]`; None if a sample is one.
        padding: The padding token, which has the position `padding`.
    """
    counts = (tokens != padding).long()
    counted = counts.cumsum(1)
    if position_ids is not None:
        starts = torch.arange(tokens.shape[1], device=tokens.device) - position_ids.expand_as(tokens)
        counted = counted - (counted - counts).gather(1, starts)
    return counted * counts + padding


class Counts(NamedTuple):
    """How a model counts positions that it is not given.

    Attributes:
        padding: The padding token that it leaves out, as `counted_positions` does; None if it counts all.
        whole: Gives the tokens of all ranks, given this rank's.
    """

    padding: int | None
    whole: Callable[[Tensor], Tensor]

    def of(self, held: Tensor, own: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return the positions of this rank's part of a model's input.

        Args:
            held: The part, tokens `[batch, seq / size]` or their embeddings.
            own: Where it lies in the samples, `[seq / size]`.
            position_ids: The positions `[batch, seq]` that the model was given, if it was.
        """
        if self.padding is None or (position_ids is not None and bool((position_ids > self.padding).all())):
            return own[None] if position_ids is None else position_ids[:, own]
        if held.is_floating_point():
            return own[None] + self.padding + 1
        return counted_positions(self.whole(held), position_ids, self.padding)[:, own]


def _with_masks(
    module: Any, args: tuple[Any, ...], named: dict[str, Any], *, model: Any, masks: Masks
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if module.config._attn_implementation == REGISTERED:
        return args, named  # attention over ranks masks by itself
    positions = named.get("position_ids")
    tokens = args[0] if args else named.get("input_ids")
    given = tokens if tokens is not None else named.get("inputs_embeds")
    if positions is None or given is None or len(args) > 1 or named.get("attention_mask") is not None:
        return args, named
    dtype = next(each.dtype for each in module.parameters() if each.dim() > 1)
    shaped = torch.empty((*given.shape[:2], 0), dtype=dtype, device=given.device)
    made = masks(module.config, shaped, positions.expand(given.shape[:2]))
    padding = padding_before(model)
    if padding is not None and tokens is not None and bool((positions <= padding).any()):
        positions = counted_positions(tokens, positions, padding)
    return args, {**named, "attention_mask": made, "position_ids": positions}


def _with_window(
    module: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take from a mask the pairs of tokens outside of a module's window: a mask that is given replaces it."""
    mask = named.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return args, named
    places = torch.arange(mask.shape[-1], device=mask.device)
    is_far = (places[:, None] - places).abs() >= module.sliding_window
    blocked = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return args, {**named, "attention_mask": mask.masked_fill(is_far, blocked)}


def _prepared(config: Any, embeddings: Tensor, positions: Tensor) -> Any:
    from transformers.masking_utils import create_masks_for_generate

    return create_masks_for_generate(config, embeddings, None, None, positions)


def _causal(config: Any, embeddings: Tensor, positions: Tensor) -> Any:
    from transformers.masking_utils import create_causal_mask

    kinds = {*(getattr(config, "layer_types", None) or ())}
    if getattr(config, "sliding_window", None) or kinds - {"full_attention"}:
        raise ValueError("its layers differ in what they see")
    return create_causal_mask(config, embeddings, None, None, positions)


def _both_ways(config: Any, embeddings: Tensor, positions: Tensor) -> Any:
    from transformers.masking_utils import create_bidirectional_mask

    starts = torch.arange(positions.shape[1], device=positions.device) - positions

    def are_together(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return starts[batch, query] == starts[batch, key]

    return create_bidirectional_mask(config, embeddings, None, and_mask_function=are_together)


MASKS: Mapping[str, Masks] = {"prepared": _prepared, "causal": _causal, "both ways": _both_ways}
"""Ways to make masks, in the order in which they are tried."""


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters
