"""The pieces of a block's forward and backward: its compute, cut by the communications within it.

Forward joins the ranks of tp `joins` times, each time with compute between a gather and a scatter (with
tensor=plain: before one all-reduce); attention's exchange over cp stands behind the first part of compute,
and experts get their tokens before the last part and give them back after it. Backward does as much, and once
more what recompute=full does again. Costs say how long all of a kind take together: each has an equal share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.cost.block import BlockCost
from shoal.cost.layout import Layout
from shoal.cost.network import Group
from shoal.simulate.passage import Collective, Exposed, Piece
from shoal.workload import Block, Workload

__all__ = ["Members", "Within"]

Members = Callable[[Group], tuple[int, ...]]
"""The global ranks of a group that the rank which is played belongs to."""


@dataclass(frozen=True, slots=True)
class Within:
    """Makes the pieces of blocks.

    Args:
        workload: What they are of.
        layout: How they are laid over ranks.
        members: Of the rank that is played.
    """

    workload: Workload
    layout: Layout
    members: Members

    def forward(self, block: Block, cost: BlockCost) -> Iterator[Piece]:
        """Of its forward."""
        seconds = (cost.tensor[0], cost.context[0], cost.expert[0])
        return self._pieces(block, cost.compute.forward, seconds, rounds=1)

    def backward(self, block: Block, cost: BlockCost, compute: float) -> Iterator[Piece]:
        """Of its backward, of whose compute so many seconds are made at once with its communications."""
        seconds = (cost.tensor[1], cost.context[1], cost.expert[1])
        rounds = 2 if self.layout.recompute == "full" and block.has_rows else 1
        return self._pieces(block, compute, seconds, rounds)

    def _pieces(
        self, block: Block, compute: float, seconds: tuple[float, float, float], rounds: int
    ) -> Iterator[Piece]:
        tensor, context, expert = seconds
        joins = max(block.joins, 1) * rounds
        before, after = self._join(tensor / joins)
        for join in range(joins):
            yield from before
            is_last = join == joins - 1
            if is_last and expert:
                yield self._exchange(block, expert / 2, rounds)
            yield compute / joins
            if is_last and expert:
                yield self._exchange(block, expert / 2, rounds)
            if join == 0 and context:
                yield self._attend(block, context, rounds)
            yield from after

    def _join(self, seconds: float) -> tuple[list[Piece], list[Piece]]:
        """What stands before the compute of a join, and what behind it."""
        if not seconds:
            return [], []
        layout, group = self.layout, self.members(Group(self.layout.tp))
        length = self.workload.length * layout.microbatch // layout.cp
        nbytes = length * self.workload.hidden * layout.width
        if layout.tensor == "plain":
            return [], [Exposed(Collective("all_reduce:row", seconds, nbytes, group))]
        gather, scatter = (
            ("shift:column", "shift:row")
            if layout.tensor == "async"
            else ("all_gather:column", "reduce_scatter:row")
        )
        return (
            [Exposed(Collective(gather, seconds / 2, nbytes, group))],
            [Exposed(Collective(scatter, seconds / 2, nbytes, group))],
        )

    def _attend(self, block: Block, seconds: float, rounds: int) -> Piece:
        layout, length = self.layout, self.workload.length
        of_tokens = length * layout.microbatch // layout.cp // layout.tp * layout.width * rounds
        keys = sum(each.kv_heads * (each.key_width + each.value_width) for each in block.attentions)
        if layout.context == "ring":
            name, nbytes = "shift:keys and values", of_tokens * keys * (layout.cp - 1)
        else:
            queries = sum(each.heads * (each.key_width + each.value_width) for each in block.attentions)
            name, nbytes = "all_to_all:heads", of_tokens * (keys + queries)
        return Exposed(Collective(name, seconds, nbytes, self.members(Group(layout.cp, layout.tp))))

    def _exchange(self, block: Block, seconds: float, rounds: int) -> Piece:
        layout = self.layout
        nbytes = block.exchanged * layout.microbatch // layout.cp * layout.width * rounds
        group = self.members(Group(layout.ep, layout.tp))
        return Exposed(Collective("all_to_all:tokens", seconds, nbytes, group))
