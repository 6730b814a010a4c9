"""The moments of a step at which a rank may be at its peak, and what it then has beside its states.

    loss        all activations, and the gradients of the loss, on the rank that has the end
    head        all activations, and what the head's backward holds
    block k     in the backward of the k-th layer from a stage's end: the layer made whole again, and what its
                backward holds besides; of this micro-batch the k layers behind it and the end keep nothing
    optimizer   nothing: the states alone

With zero2 and zero3, at block k, come buckets of fp32 gradients: the one that is filled, the two before it,
and where the backend copies what it reduces, as gloo does, one of these again; of those before, this rank's
shards. The head is a bucket, and so is each layer, with zero2 as many layers as `bucket` says.

With zero3 come the weights that are gathered: those of embedding and head from forward to backward and the
last layer's; at block k those of two layers and of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cost.activations import BlockMemory, EndMemory
from shoal.cost.layout import Layout
from shoal.plan import Plan

__all__ = ["Moment", "StageEnds", "gathered_bytes", "moments_of"]

_FP32 = 4.0  # bytes


class Moment(NamedTuple):
    """Bytes beside the states.

    Attributes:
        name: As above.
        activations: Kept from forward to backward, or made again from what was.
        working: What exists for this moment alone.
        gathered: Weights of zero3.
        buckets: Gradients not yet reduced.
        freed: Gradients that were reduced since the step began; what a rank has of them is this over the
            shards.
    """

    name: str
    activations: float = 0.0
    working: float = 0.0
    gathered: float = 0.0
    buckets: float = 0.0
    freed: float = 0.0

    @property
    def whole(self) -> float:
        """All bytes that no number of shards divides."""
        return self.activations + self.working + self.gathered + self.buckets

    def covers(self, other: Moment) -> bool:
        """Whether it is at least as much as another, whatever the number of shards."""
        return self.whole >= other.whole and self.freed >= other.freed


@dataclass(frozen=True, slots=True)
class StageEnds:
    """What a rank has of the model's ends.

    Attributes:
        embedding: Parameters of the embedding on it.
        head: Parameters of the end on it, a tied weight that is another rank's among them.
        kept: Bytes that the end keeps of a micro-batch.
        last: What loss and head hold for a moment; None where the end is another rank's.
    """

    embedding: float = 0.0
    head: float = 0.0
    kept: float = 0.0
    last: EndMemory | None = None


def moments_of(
    plan: Plan,
    layout: Layout,
    held: float,
    layers: Sequence[BlockMemory],
    ends: StageEnds,
    *,
    copies: bool,
) -> Iterator[Moment]:
    """The moments of one rank; of the layers between, those that others do not exceed are left out.

    Args:
        plan: Says sharding and buckets.
        layout: Of the same Plan.
        held: Bytes of all activations at the rank's fullest moment.
        layers: Of the stage whose backward comes next, from its end.
        ends: What the rank has of the model's ends.
        copies: Whether the backend copies what it reduces.
    """
    gathers = layout.width if plan.shard == "zero3" else 0
    if ends.last is not None:
        gathered = gathered_bytes(plan, layout, layers, ends)
        yield Moment("loss", held, ends.last.loss, gathered)
        yield Moment("head", held, ends.last.head, gathered)
    buckets = _Buckets(plan, layout, layers, ends, copies)
    for index in _telling(layers):
        layer = layers[index]
        left = held - ends.kept - sum(each.kept for each in layers[: index + 1])
        gathered = ends.embedding + sum(each.parameters for each in layers[index : index + 2])
        filled, freed = buckets.at(index)
        yield Moment(f"block {index}", left + layer.whole, layer.working, gathers * gathered, filled, freed)


def gathered_bytes(plan: Plan, layout: Layout, layers: Sequence[BlockMemory], ends: StageEnds) -> float:
    """Weights that zero3 has gathered when forward ends; arguments as of `moments_of`."""
    if plan.shard != "zero3":
        return 0.0
    return layout.width * (ends.embedding + ends.head + sum(layer.parameters for layer in layers[:1]))


def _telling(layers: Sequence[BlockMemory]) -> list[int]:
    """The layers at which memory can be most: between them it changes evenly."""
    firsts = {layer: index for index, layer in reversed(list(enumerate(layers)))}
    return sorted({0, 1, 2, len(layers) - 1, *firsts.values()} & set(range(len(layers))))


class _Buckets:
    """Gradients with zero2 and zero3: a bucket for the head, then one for each group of layers."""

    def __init__(
        self, plan: Plan, layout: Layout, layers: Sequence[BlockMemory], ends: StageEnds, copies: bool
    ) -> None:
        self._together = 1
        self._copies = copies
        self._sizes: list[float] = []
        self._freed: list[float] = []
        if plan.shard not in ("zero2", "zero3"):
            return
        sizes = [_FP32 * layer.parameters for layer in layers]
        # Experts are on ep times fewer ranks that share their gradients' shards.
        freed = [_FP32 * (layer.dense + layout.ep * layer.experts) for layer in layers]
        if plan.shard == "zero2" and sizes:
            self._together = max(1, min(len(sizes), round(plan.bucket / max(sizes[0], 1.0))))
        head = _FP32 * ends.head
        self._sizes = [head, *self._grouped(sizes)]
        self._freed = [head, *self._grouped(freed)]

    def at(self, layer: int) -> tuple[float, float]:
        """Bytes of the buckets in memory in a layer's backward, and of those freed before."""
        if not self._sizes:
            return 0.0, 0.0
        current = 1 + layer // self._together
        first = max(0, current - 2)
        copied = self._sizes[current - 1] if self._copies else 0.0
        return sum(self._sizes[first : current + 1]) + copied, sum(self._freed[:first])

    def _grouped(self, layers: Sequence[float]) -> list[float]:
        starts = range(0, len(layers), self._together)
        return [sum(layers[start : start + self._together]) for start in starts]
