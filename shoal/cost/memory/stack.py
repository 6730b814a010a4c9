"""The layers of a stage in the order of its backward, with running sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.cost.memory.activations import BlockMemory

_FP32 = 4.0  # bytes


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers of one stage; each sum is over all layers before a position, in backward's order.

    Attributes:
        layers: Memory of each layer.
        peak_candidates: Positions of the layers at which memory can be highest; between them it changes
            evenly.
        kept: Sums of bytes kept for a micro-batch.
        gradients: Sums of bytes of fp32 gradients on the rank.
        freed: Sums of bytes of fp32 gradients with those of experts times ep, because ep times fewer ranks
            share the shards of experts' gradients.
    """

    layers: tuple[BlockMemory, ...]
    peak_candidates: tuple[int, ...]
    kept: tuple[float, ...]
    gradients: tuple[float, ...]
    freed: tuple[float, ...]

    @classmethod
    def of(cls, layers: Sequence[BlockMemory], ep: int) -> Stack:
        """Make a stack of layers in forward's order, whose experts are spread over ep ranks."""
        turned = tuple(layers[::-1])
        firsts = {layer: place for place, layer in reversed(list(enumerate(turned)))}
        places = {0, 1, 2, len(turned) - 1, *firsts.values()} & set(range(len(turned)))
        return cls(
            turned,
            tuple(sorted(places)),
            tuple(accumulate((each.kept for each in turned), initial=0.0)),
            tuple(accumulate((_FP32 * each.parameters for each in turned), initial=0.0)),
            tuple(accumulate((_FP32 * (each.dense + ep * each.experts) for each in turned), initial=0.0)),
        )
