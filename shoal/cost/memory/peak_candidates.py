"""The moments of a step at which a rank may be at its peak, and its bytes then, without its states.

    loss        all activations, and the gradients of the loss, on the rank that has the end
    head        all activations, and the working memory of the head's backward
    block k     in the backward of the k-th layer from a stage's end: all activations of that layer, made
                again if need be, and the working memory of its backward. In this micro-batch the k layers
                behind it and the end keep nothing any more
    optimizer   nothing: the states alone

With zero2 and zero3, block k also has buckets of fp32 gradients: the one that is filled now and the two
before it. If the backend copies what it reduces, as gloo does, one of these counts twice. Of earlier buckets
the rank has its shards. The head is one bucket. Each layer is one bucket too, or with zero2 as many layers as
`bucket` allows.

With zero3 and zero3-once the gathered weights count too: those of embedding and head from forward to
backward, and those of the last layer; at block k, those of two layers and of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cost.layout import Layout
from shoal.cost.memory.activations import EndMemory
from shoal.cost.memory.stack import Stack
from shoal.plan import Sharding

_FP32 = 4.0  # bytes


class Moment(NamedTuple):
    """Bytes that a rank holds at one moment, beside the states.

    Attributes:
        name: Name of the moment, as in the table above.
        activations: Bytes kept from forward to backward, or made again from those.
        working: Bytes that exist for this moment alone.
        gathered: Bytes of gathered weights, if these are cut.
        buckets: Bytes of gradients not yet reduced.
        freed: Bytes of gradients that were reduced since the step began. A rank holds these divided by the
            sharding degree.
    """

    name: str
    activations: float = 0.0
    working: float = 0.0
    gathered: float = 0.0
    buckets: float = 0.0
    freed: float = 0.0

    @property
    def whole(self) -> float:
        """Bytes that do not depend on the sharding degree."""
        return self.activations + self.working + self.gathered + self.buckets

    def covers(self, other: Moment) -> bool:
        """Return whether it has at least the bytes of another moment, whatever the sharding degree."""
        return self.whole >= other.whole and self.freed >= other.freed


@dataclass(frozen=True, slots=True)
class StageEnds:
    """The parts of the model's embedding and end that are on a rank.

    Attributes:
        embedding: Number of parameters of the embedding on the rank, trained or not.
        head: Number of parameters of the end on the rank, trained or not. They include a tied weight whose
            embedding is on another rank.
        trained: Number of those of the end that are trained.
        kept: Bytes that the end keeps for a micro-batch.
        last: Bytes that loss and head hold for a moment; None if the end is on another rank.
    """

    embedding: float = 0.0
    head: float = 0.0
    trained: float = 0.0
    kept: float = 0.0
    last: EndMemory | None = None


def moments_of(
    sharding: Sharding,
    bucket: int,
    layout: Layout,
    held: float,
    stack: Stack,
    ends: StageEnds,
    *,
    copies: bool,
) -> Iterator[Moment]:
    """Yield the moments of one rank, without the layers at which memory cannot be highest.

    Args:
        sharding: The Plan's sharding.
        bucket: The Plan's bytes of a bucket.
        layout: The Plan's layout.
        held: Bytes of all activations at the rank's fullest moment.
        stack: The layers of the stage whose backward comes next.
        ends: The parts of the model's ends on the rank.
        copies: Whether the backend copies what it reduces.
    """
    layers = stack.layers
    gathers = layout.width if sharding.cuts_weights else 0
    if ends.last is not None:
        gathered = gathered_bytes(sharding, layout, stack, ends)
        yield Moment("loss", held, ends.last.loss, gathered)
        yield Moment("head", held, ends.last.head, gathered)
    buckets = _Buckets(sharding, bucket, stack, ends, copies) if sharding.cuts_gradients else None
    for place in stack.peak_candidates:
        layer = layers[place]
        left = held - ends.kept - stack.kept[place + 1]
        gathered = ends.embedding + sum([each.weights for each in layers[place : place + 2]])
        filled, freed = (0.0, 0.0) if buckets is None else buckets.at(place)
        yield Moment(f"block {place}", left + layer.whole, layer.working, gathers * gathered, filled, freed)


def gathered_bytes(sharding: Sharding, layout: Layout, stack: Stack, ends: StageEnds) -> float:
    """Return the bytes of cut weights that are gathered when forward ends.

    The arguments are those of `moments_of`.
    """
    if not sharding.cuts_weights:
        return 0.0
    return layout.width * (ends.embedding + ends.head + sum([each.weights for each in stack.layers[:1]]))


class _Buckets:
    """Gradients with zero2 and zero3: bucket 0 for the head, then one for each group of layers."""

    def __init__(self, sharding: Sharding, bucket: int, stack: Stack, ends: StageEnds, copies: bool) -> None:
        self._stack = stack
        self._head = _FP32 * ends.trained
        self._copies = copies
        self._together = 1
        if sharding.bucket_is_memory and stack.layers:
            layers, first = len(stack.layers), stack.gradients[1]
            self._together = max(1, min(layers, round(bucket / max(first, 1.0))))

    def at(self, place: int) -> tuple[float, float]:
        """Return the bytes of the buckets in memory in a layer's backward, and of those freed before."""
        current = 1 + place // self._together
        first = max(0, current - 2)
        filled = self._before(current + 1, self._stack.gradients) - self._before(first, self._stack.gradients)
        copied = 0.0
        if self._copies:
            copied = self._before(current, self._stack.gradients)
            copied -= self._before(current - 1, self._stack.gradients)
        return filled + copied, self._before(first, self._stack.freed)

    def _before(self, bucket: int, sums: tuple[float, ...]) -> float:
        """Return the bytes of the buckets before one."""
        if bucket == 0:
            return 0.0
        return self._head + sums[min((bucket - 1) * self._together, len(sums) - 1)]
