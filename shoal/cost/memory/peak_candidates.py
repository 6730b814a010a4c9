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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cost.layout import Layout
from shoal.cost.memory.activations import EndMemory
from shoal.cost.memory.stack import Stack
from shoal.plan import SettledPlan

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
    plan: SettledPlan,
    layout: Layout,
    held: float,
    stack: Stack,
    ends: StageEnds,
    *,
    copies: bool,
) -> Iterator[Moment]:
    """The moments of one rank; of the layers between, those that others do not exceed are left out.

    Args:
        plan: Says sharding and buckets.
        layout: Of the same Plan.
        held: Bytes of all activations at the rank's fullest moment.
        stack: The layers of the stage whose backward comes next.
        ends: What the rank has of the model's ends.
        copies: Whether the backend copies what it reduces.
    """
    layers = stack.layers
    gathers = layout.width if plan.sharding.cuts_weights else 0
    if ends.last is not None:
        gathered = gathered_bytes(plan, layout, stack, ends)
        yield Moment("loss", held, ends.last.loss, gathered)
        yield Moment("head", held, ends.last.head, gathered)
    buckets = _Buckets(plan, stack, ends, copies) if plan.sharding.cuts_gradients else None
    for place in stack.peak_candidates:
        layer = layers[place]
        left = held - ends.kept - stack.kept[place + 1]
        gathered = ends.embedding + sum([each.parameters for each in layers[place : place + 2]])
        filled, freed = (0.0, 0.0) if buckets is None else buckets.at(place)
        yield Moment(f"block {place}", left + layer.whole, layer.working, gathers * gathered, filled, freed)


def gathered_bytes(plan: SettledPlan, layout: Layout, stack: Stack, ends: StageEnds) -> float:
    """Weights that zero3 has gathered when forward ends; arguments as of `moments_of`."""
    if not plan.sharding.cuts_weights:
        return 0.0
    return layout.width * (ends.embedding + ends.head + sum([each.parameters for each in stack.layers[:1]]))


class _Buckets:
    """Gradients with zero2 and zero3: bucket 0 for the head, then one for each group of layers."""

    def __init__(self, plan: SettledPlan, stack: Stack, ends: StageEnds, copies: bool) -> None:
        self._stack = stack
        self._head = _FP32 * ends.head
        self._copies = copies
        self._together = 1
        if plan.sharding.bucket_is_memory and stack.layers:
            layers, first = len(stack.layers), stack.gradients[1]
            self._together = max(1, min(layers, round(plan.bucket / max(first, 1.0))))

    def at(self, place: int) -> tuple[float, float]:
        """Bytes of the buckets in memory in a layer's backward, and of those freed before."""
        current = 1 + place // self._together
        first = max(0, current - 2)
        filled = self._before(current + 1, self._stack.gradients) - self._before(first, self._stack.gradients)
        copied = 0.0
        if self._copies:
            copied = self._before(current, self._stack.gradients)
            copied -= self._before(current - 1, self._stack.gradients)
        return filled + copied, self._before(first, self._stack.freed)

    def _before(self, bucket: int, sums: tuple[float, ...]) -> float:
        """Bytes of the buckets before one."""
        if bucket == 0:
            return 0.0
        return self._head + sums[min((bucket - 1) * self._together, len(sums) - 1)]
