"""The blocks of each rank along the axis `pp` under a Layout, and the activations that they keep.

This part of the memory is the same for every sharding of the states, so it is computed once.

Moments of a step
-----------------

The moments of a step at which a rank may be at its peak, and its bytes then, without its states.

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

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from operator import mul
from typing import NamedTuple

from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory.activations import (
    BlockMemory,
    EndMemory,
    Stack,
    block_memory,
    end_memory,
    in_file,
)
from shoal.predict.cost.time.split import as_kept
from shoal.spec.plan import Sharding
from shoal.spec.plan.schedules import Held
from shoal.spec.workload import Block, Workload

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


@dataclass(frozen=True, slots=True)
class Outline:
    """Parameters, activations and layers of one rank.

    Attributes:
        index: The rank's index along `pp`.
        dense: Number of trained parameters after tensor parallelism, without experts.
        experts: Number of trained parameters of its experts.
        activations: Bytes of the activations of all micro-batches at its fullest moment.
        stack: The layers of the stage whose backward comes next at that moment.
        ends: The parts of the model's ends on the rank.
        frozen: Number of other parameters, without experts and with them.
    """

    index: int
    dense: float
    experts: float
    activations: float
    stack: Stack
    ends: StageEnds
    frozen: tuple[float, float] = (0.0, 0.0)

    def covers(self, other: Outline) -> bool:
        """Return whether it needs at least another's memory at every moment, under any sharding."""
        mine, its = self.ends, other.ends
        return (
            self.dense >= other.dense
            and self.experts >= other.experts
            and self.frozen[0] >= other.frozen[0]
            and self.frozen[1] >= other.frozen[1]
            and self.activations >= other.activations
            and self.activations - mine.kept >= other.activations - its.kept
            and mine.embedding >= its.embedding
            and mine.head >= its.head
            and (mine.last is not None or its.last is None)
            and self.stack.layers[: len(other.stack.layers)] == other.stack.layers
        )


class Pieces:
    """The pieces of a Workload under a Layout, with running sums over them.

    Args:
        workload: The Workload that is laid over ranks.
        layout: The Layout that it has there.
        kept: The pieces in whose backward nothing is computed again.
        stored: The pieces whose activations are in files from forward to backward.
    """

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        kept: Container[int] = (),
        stored: Container[int] = (),
    ) -> None:
        last = len(workload.layers) + 1
        known: dict[tuple[Block, bool, bool], BlockMemory] = {}
        kinds = []
        for piece, block in enumerate(workload.pieces):
            made = as_kept(block) if piece in kept else block
            key = made, 0 < piece < last, piece in stored
            if key not in known:
                found = block_memory(made, workload, layout, is_layer=0 < piece < last)
                known[key] = in_file(found) if piece in stored else found
            kinds.append(key)
        self._blocks = tuple([known[key] for key in kinds])
        numbers = {key: number for number, key in enumerate(known)}
        self._numbers = tuple([numbers[key] for key in kinds])  # equal for equal blocks
        self._of_number = tuple(known.values())
        self._ep = layout.ep
        self._stack_of = cache(self._stack)
        self._kept = _sums(self._blocks, lambda block: block.kept)
        self._halves = _sums(self._blocks, lambda block: block.halves)
        self._dense = _sums(self._blocks, lambda block: block.dense)
        self._experts = _sums(self._blocks, lambda block: block.experts)
        self._frozen = tuple(
            _sums(self._blocks, of) for of in (lambda block: block.frozen, lambda block: block.frozen_experts)
        )
        has = product((False, True), repeat=2)  # the embedding, the end
        self._ends = {each: self._ends_of(workload, layout, *each) for each in has}

    def outlines(
        self,
        stages: Sequence[range],
        placement: Sequence[int],
        held: Sequence[Sequence[Held]],
        places: Container[int] | None = None,
    ) -> Iterator[Outline]:
        """Yield the outline of each rank, in order.

        Args:
            stages: The pieces of each stage.
            placement: The rank of each stage.
            held: For each rank, the moments at which it may hold most.
            places: The ranks that are asked for; None for all.
        """
        mine: list[list[range]] = [[] for _ in held]
        for stage, rank in zip(stages, placement, strict=True):
            mine[rank].append(stage)
        for index, (ranges, moments) in enumerate(zip(mine, held, strict=True)):
            if places is None or index in places:
                yield self._outline(index, ranges, moments)

    def _ends_of(
        self, workload: Workload, layout: Layout, has_embedding: bool, has_end: bool
    ) -> tuple[StageEnds, float, float]:
        """Return the ends on a rank, and the size of a tied weight whose embedding is on another rank.

        The size is given twice: as trained parameters, and as frozen ones.
        """
        embedding, end = self._blocks[0], self._blocks[-1]
        tied = still = 0.0
        if workload.tied and has_end and not has_embedding:
            tied = workload.embedding.parameters.divided / layout.tp
            still = workload.embedding.frozen.divided / layout.tp
        ends = StageEnds(
            embedding.weights if has_embedding else 0.0,
            end.weights + tied + still if has_end else 0.0,
            end.parameters + tied if has_end else 0.0,
            end.kept if has_end else 0.0,
            end_memory(workload, layout) if has_end else None,
        )
        return ends, tied, still

    def _outline(self, index: int, stages: Sequence[range], held: Sequence[Held]) -> Outline:
        last = len(self._blocks) - 1
        ends, tied, still = self._ends[stages[0].start == 0, stages[-1].stop == last + 1]
        layers = range(0)
        for stage in stages:
            layers = range(max(stage.start, 1), min(stage.stop, last)) or layers
        kept, halves = _over(self._kept, stages), _over(self._halves, stages)
        return Outline(
            index,
            tied + sum(_over(self._dense, stages)),
            sum(_over(self._experts, stages)),
            max([sum(map(mul, whole, kept)) + sum(map(mul, half, halves)) for whole, half in held]),
            self._stack_of(self._numbers[layers.start : layers.stop]),
            ends,
            (still + sum(_over(self._frozen[0], stages)), sum(_over(self._frozen[1], stages))),
        )

    def _stack(self, numbers: tuple[int, ...]) -> Stack:
        """Return the stack of the layers with these blocks."""
        return Stack.of([self._of_number[number] for number in numbers], self._ep)


def _sums(blocks: Sequence[BlockMemory], of: Callable[[BlockMemory], float]) -> list[float]:
    return list(accumulate(map(of, blocks), initial=0.0))


def _over(sums: Sequence[float], stages: Sequence[range]) -> list[float]:
    """Return each stage's sum, from running sums over all layers."""
    return [sums[stage.stop] - sums[stage.start] for stage in stages]
