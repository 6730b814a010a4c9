"""The passages of one stage: the pieces of each of its forwards and backwards.

Weights and gradients travel beside compute as in `shoal.parallel`:

    none    gradients are reduced bucket by bucket in the step's last backward (after it if pp > 1)
    zero1   as none; and when a step begins, the weights that the optimizer changed are gathered: all
            gathers begin at once, and each is waited for where the first forward needs it
    zero2   as zero1, but every backward reduces the gradients that it has copied in fp32 to buckets
    zero3   each block is gathered while the one before it computes, in forward and in backward, and reduced
            in every backward. Without a pipeline the forward's last block, the embedding and the end stay for
            the backward that follows. zero3-once gathers as zero3, and reduces as none
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property

from shoal.cost import Costs, Layout
from shoal.plan import SettledPlan
from shoal.plan.schedules import Work
from shoal.simulate.data_parallel import DataParallel
from shoal.simulate.passage import Passage, Piece
from shoal.simulate.within import Members, Within
from shoal.workload import Block


class StageProgram:
    """Make the passage of any action of a stage.

    Args:
        plan: The Plan that is played, with a fixed micro-batch.
        costs: Costs of the Plan's workload on its cluster.
        stage: A number that no other stage of its rank has.
        blocks: Blocks of the stage, in order.
        members: The groups of the rank that holds the stage.
        is_named: Whether each communication needs a name, for a Timeline.
        exchanges: Whether gradients and weights are communicated.
    """

    def __init__(
        self,
        plan: SettledPlan,
        costs: Costs,
        stage: int,
        blocks: Sequence[Block],
        members: Members,
        *,
        is_named: bool = True,
        exchanges: bool = True,
    ) -> None:
        self._plan = plan
        self._blocks = blocks
        self._within = cache(Within(costs, Layout.of(plan), members).pieces)
        self.data_parallel = DataParallel(
            plan, costs, stage, blocks, members, is_named=is_named, exchanges=exchanges
        )
        self.keeps_sums = not (exchanges and plan.sharding.reduces_each_micro_batch)
        self._gathers_blocks = self.data_parallel.is_sharded and plan.sharding.cuts_weights
        self._gathers_all = self.data_parallel.is_sharded and not self._gathers_blocks
        self._passages: dict[tuple[Work, bool, bool], Passage] = {}

    def passage(self, work: Work, *, is_first: bool = False, is_last: bool = False) -> Passage:
        """Return the passage of an action of this stage.

        Args:
            work: Kind of the action.
            is_first: Whether it is the stage's first forward of a step.
            is_last: Whether it is the last action that adds to the gradients of the stage's weights.
        """
        key = work, is_first, is_last
        if key not in self._passages:
            passage = Passage.of(self.pieces(work, is_first, is_last))
            self._passages[key] = passage.gathered() if passage.is_plain and self._plan.pp > 1 else passage
        return self._passages[key]

    def begin_step(self) -> list[Piece]:
        """Return the communications that begin when a step begins."""
        return self.data_parallel.gather_all() if self._gathers_all else []

    def pieces(self, work: Work, is_first: bool, is_last: bool) -> Iterator[Piece]:
        """Yield the pieces of a passage; the arguments are those of `passage`."""
        if work is Work.FORWARD:
            return self._forward(is_first)
        return self._backward(work, is_last)

    @cached_property
    def _layers(self) -> list[int]:
        return [each for each in range(len(self._blocks)) if each not in self.data_parallel.roots]

    def _forward(self, is_first: bool) -> Iterator[Piece]:
        data_parallel = self.data_parallel
        waits = self._gathers_blocks or (is_first and self._gathers_all)
        if self._gathers_blocks:
            yield from self._gather_each((*data_parallel.roots, *self._layers[:1]))
        if waits:
            yield from self._wait_each(data_parallel.roots)
        for position, block in enumerate(self._blocks):
            if position in self._layers:
                if waits:
                    yield from data_parallel.wait_gathered(position)
                if self._gathers_blocks and position + 1 in self._layers:
                    yield from data_parallel.gather(position + 1)
            yield from self._within(block, Work.FORWARD)

    def _backward(self, work: Work, is_last: bool) -> Iterator[Piece]:
        data_parallel = self.data_parallel
        gives_sums = work is not Work.INPUT
        naive = self._plan.exchange == "naive"
        reduces = gives_sums and not naive and (not self.keeps_sums or (is_last and self._plan.pp == 1))
        gathers = self._gathers_blocks and work is not Work.WEIGHT
        there: set[int] = set()  # blocks whose weights are there, or whose gather has started
        if gathers:
            stayed = {*data_parallel.roots, *self._layers[-1:]} if self._plan.pp == 1 else set()
            there = {*stayed, *data_parallel.roots, *self._layers[-1:]}
            yield from self._gather_each(sorted(there - stayed))
            yield from self._wait_each(sorted(set(data_parallel.roots) - stayed))
        for position in reversed(range(len(self._blocks))):
            if gathers and position in self._layers:
                yield from data_parallel.wait_gathered(position)
                if position - 1 in self._layers:
                    yield from data_parallel.gather(position - 1)
            yield from self._within(self._blocks[position], work)
            if reduces:
                if not self.keeps_sums:
                    yield data_parallel.copy_at(position)
                yield from data_parallel.reduce_at(position)
        if reduces:
            yield from data_parallel.wait_reduced()
        if naive and is_last:
            yield from data_parallel.naive()

    def _gather_each(self, positions: Sequence[int]) -> Iterator[Piece]:
        for position in positions:
            yield from self.data_parallel.gather(position)

    def _wait_each(self, positions: Sequence[int]) -> Iterator[Piece]:
        for position in positions:
            yield from self.data_parallel.wait_gathered(position)
