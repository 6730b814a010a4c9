"""Fragments of a model: the parameters that are merged together, in one vector or a few."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from shoal.parallel.communication import new_buffer
from shoal.parallel.owned import Owned
from shoal.parallel.parallel import Parallel


@dataclass(frozen=True, slots=True)
class ParameterVector:
    """This rank's parts of some parameters, which a vector holds one after another.

    Attributes:
        owned: The parts.
        device: Where they lie.
    """

    owned: Sequence[Owned]
    device: torch.device

    @property
    def elements(self) -> int:
        """Length of the vector."""
        return sum(each.local.numel() for each in self.owned)

    def new(self) -> torch.Tensor:
        """Return a vector `[elements]`, fp32, with undefined content."""
        return new_buffer(self.elements, dtype=torch.float32, device=self.device)

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a vector, `[rows, ...]` each."""
        parts = vector.split([each.local.numel() for each in self.owned])
        return [part.view(each.local.shape) for part, each in zip(parts, self.owned, strict=True)]

    def packed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a vector with these values."""
        vector = self.new()
        torch._foreach_copy_(self.views(vector), list(tensors))
        return vector


def vectors_of(parallel: Parallel, owned: Sequence[Owned]) -> list[ParameterVector]:
    """Return vectors that hold a rank's parts, in an order that is equal on all ranks.

    Parts of which other ranks of the worker hold copies, such as a norm's under tp, have vectors of their
    own, one for each set of ranks that hold equal parts. What a codec makes of an element, and in which order
    an all-reduce adds it up, depend on the whole vector: so these ranks' vectors are equal, and copies stay
    equal bit by bit.
    """
    held: dict[Hashable, list[Owned]] = {}
    for each in _in_order(parallel, owned):
        family, tied = each.family, each.family.tied_ranks
        holders = None
        if family.copies > 1:
            holders = family.replicate.members, None if tied is None else tied.members
        held.setdefault(holders, []).append(each)
    return [ParameterVector(parts, parallel.device) for parts in held.values()]


def fragments_of(parallel: Parallel, number: int) -> list[list[Owned]]:
    """Cut a rank's parts, from the last layer to the first, into fragments of about equally many elements.

    Each part is whole in one fragment. If there are fewer parts than fragments, some fragments are empty.
    Ranks that hold copies of a parameter have it in the same fragment: sizes are those of whole parameters,
    and what the first and the last pipeline stage share is in the first fragment.
    """
    owned = _in_order(parallel, parallel.owned)
    sizes = [_elements(parallel, each) for each in owned]
    total = sum(sizes) or 1
    cut: list[list[Owned]] = [[] for _ in range(number)]
    before = 0
    for each, size in zip(owned, sizes, strict=True):
        middle = before + size / 2
        is_tied = each.family.tied_ranks is not None
        cut[0 if is_tied else min(number - 1, int(middle * number / total))].append(each)
        before += size
    return cut


def _in_order(parallel: Parallel, owned: Sequence[Owned]) -> list[Owned]:
    """Return parts in the model's order, the last first: buckets may be cut otherwise on other ranks."""
    position = {name: number for number, (name, _) in enumerate(parallel.named_parameters())}
    return sorted(owned, key=lambda each: position[each.name], reverse=True)


def _elements(parallel: Parallel, owned: Owned) -> int:
    """Return a parameter's size, equal on all ranks that have a part of it; of experts, those of one rank."""
    is_expert = owned.family is parallel.axes.experts and owned.cut is not None
    return math.prod(owned.cut.block_shape if is_expert and owned.cut is not None else owned.shape)
