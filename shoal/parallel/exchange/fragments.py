"""Fragments of a model: the parameters that are merged together, in one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.parallel.communication import new_buffer
from shoal.parallel.owned import Owned

__all__ = ["Fragment", "fragments_of"]


@dataclass(frozen=True, slots=True)
class Fragment:
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


def fragments_of(owned: Sequence[Owned], number: int) -> list[Fragment]:
    """Cut a rank's parts, in their order, into fragments of about equal numbers of elements.

    Each part is whole in one fragment. If there are fewer parts than fragments, some fragments are empty.
    """
    device = owned[0].local.device if owned else torch.device("cpu")
    total = sum(each.local.numel() for each in owned) or 1
    cut: list[list[Owned]] = [[] for _ in range(number)]
    before = 0
    for each in owned:
        middle = before + each.local.numel() / 2
        cut[min(number - 1, int(middle * number / total))].append(each)
        before += each.local.numel()
    return [Fragment(part, device) for part in cut]
