"""What the ranks along the axis `pp` have of a model under a Layout: their blocks, and what these keep.

That is the part of their memory that is the same for every way to shard the states, so it is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.cost.activations import BlockMemory, block_memory, end_memory
from shoal.cost.held import Held
from shoal.cost.layout import Layout
from shoal.cost.moments import StageEnds
from shoal.workload import Workload

__all__ = ["Outline", "Pieces"]


@dataclass(frozen=True, slots=True)
class Outline:
    """What one rank has.

    Attributes:
        index: Of the rank along `pp`.
        dense: Parameters after tensor parallelism, without experts.
        experts: Parameters of its experts.
        activations: Bytes of all micro-batches at its fullest moment.
        layers: Of the stage whose backward comes next then, from its end.
        ends: What it has of the model's ends.
    """

    index: int
    dense: float
    experts: float
    activations: float
    layers: tuple[BlockMemory, ...]
    ends: StageEnds

    def covers(self, other: Outline) -> bool:
        """Whether it needs at least as much as another at every moment, however states are sharded."""
        mine, its = self.ends, other.ends
        return (
            self.dense >= other.dense
            and self.experts >= other.experts
            and self.activations >= other.activations
            and self.activations - mine.kept >= other.activations - its.kept
            and mine.embedding >= its.embedding
            and mine.head >= its.head
            and (mine.last is not None or its.last is None)
            and self.layers[: len(other.layers)] == other.layers
        )


class Pieces:
    """The pieces of a Workload under a Layout, with running sums over them.

    Args:
        workload: What is laid out.
        layout: How.
    """

    def __init__(self, workload: Workload, layout: Layout) -> None:
        last = len(workload.layers) + 1
        known: dict[tuple[int, bool], BlockMemory] = {}
        blocks = []
        for piece, block in enumerate(workload.pieces):
            key = id(block), 0 < piece < last
            if key not in known:
                known[key] = block_memory(block, workload, layout, is_layer=0 < piece < last)
            blocks.append(known[key])
        self._blocks = tuple(blocks)
        self._kept = _sums(self._blocks, lambda block: block.kept)
        self._halves = _sums(self._blocks, lambda block: block.halves)
        self._dense = _sums(self._blocks, lambda block: block.dense)
        self._experts = _sums(self._blocks, lambda block: block.experts)
        self._end = end_memory(workload, layout)
        self._tied = workload.embedding.parameters.divided / layout.tp if workload.tied else 0.0

    def outlines(
        self, stages: Sequence[range], placement: Sequence[int], held: Sequence[Sequence[Held]]
    ) -> Iterator[Outline]:
        """What each rank has, in order.

        Args:
            stages: The pieces of each.
            placement: By stage, its rank.
            held: By rank, the moments at which it may hold most.
        """
        mine: list[list[range]] = [[] for _ in held]
        for stage, rank in zip(stages, placement, strict=True):
            mine[rank].append(stage)
        for index, (ranges, moments) in enumerate(zip(mine, held, strict=True)):
            yield self._outline(index, ranges, moments)

    def _outline(self, index: int, stages: Sequence[range], held: Sequence[Held]) -> Outline:
        last = len(self._blocks) - 1
        has_embedding, has_end = stages[0].start == 0, stages[-1].stop == last + 1
        tied = self._tied if has_end and not has_embedding else 0.0
        ends = StageEnds(
            self._blocks[0].parameters if has_embedding else 0.0,
            self._blocks[last].parameters + tied if has_end else 0.0,
            self._blocks[last].kept if has_end else 0.0,
            self._end if has_end else None,
        )
        layers: tuple[BlockMemory, ...] = ()
        for stage in stages:
            layers = self._blocks[max(stage.start, 1) : min(stage.stop, last)] or layers
        return Outline(
            index,
            tied + sum(_over(self._dense, stage) for stage in stages),
            sum(_over(self._experts, stage) for stage in stages),
            max(self._held(stages, moment) for moment in held),
            layers[::-1],
            ends,
        )

    def _held(self, stages: Sequence[range], held: Held) -> float:
        return sum(
            whole * _over(self._kept, stage) + half * _over(self._halves, stage)
            for stage, whole, half in zip(stages, *held, strict=True)
        )


def _sums(blocks: Sequence[BlockMemory], of: Callable[[BlockMemory], float]) -> list[float]:
    return list(accumulate(map(of, blocks), initial=0.0))


def _over(sums: Sequence[float], stage: range) -> float:
    return sums[stage.stop] - sums[stage.start]
