"""Whole parameters out of what the ranks have of them, whatever cut them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shoal.parallel.bucket import Frozen, Owned
from shoal.parallel.communication import Axis
from shoal.parallel.layout import Cut

__all__ = ["whole_parameters"]


def whole_parameters(
    model: nn.Module,
    owned: Sequence[Owned],
    frozen: Sequence[Frozen],
    cuts: Mapping[str, Cut],
    world: Axis,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter of a model, one after another, the same on every rank.

    Of each element one rank adds the value, and the others add zero, so the sums are exact.

    Args:
        model: Says which parameters, in which order.
        owned: What this rank owns of those that are trained.
        frozen: What it has of the others.
        cuts: Of the parameters of which this rank has a block, which one; by name.
        world: All ranks, which go through it together.

    Yields:
        A parameter's name, and its values on the device: fp32 if it is trained, else as the model has it.
    """
    held: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name, _ in model.named_parameters()}
    for frozen_part in frozen:
        if frozen_part.is_first_copy:
            held[frozen_part.name].append((0, frozen_part.parameter.detach()))
    for part in owned:
        if part.family.is_first:
            held[part.name].append((part.start, part.parameter.detach()))
    for name, parameter in model.named_parameters():
        cut = cuts.get(name)
        dtype = torch.float32 if parameter.requires_grad else parameter.dtype
        whole = torch.zeros(
            parameter.shape if cut is None else cut.shape, dtype=dtype, device=parameter.device
        )
        block = whole if cut is None else cut.of(whole)
        flat = torch.zeros(block.numel(), dtype=dtype, device=parameter.device)
        for start, values in held[name]:
            flat[start : start + values.numel()] = values.reshape(-1)
        block.copy_(flat.view(block.shape))
        world.all_reduce(whole, f"whole {name}").wait()
        yield name, whole
