"""The blocks of each rank along the axis `pp` under a Layout, and the activations that they keep.

This part of the memory is the same for every sharding of the states, so it is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from operator import mul

from shoal.cost.layout import Layout
from shoal.cost.memory.activations import BlockMemory, block_memory, end_memory, in_file
from shoal.cost.memory.peak_candidates import StageEnds
from shoal.cost.memory.stack import Stack
from shoal.cost.time.split import as_kept
from shoal.plan.schedules import Held
from shoal.workload import Block, Workload


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
