"""What data-parallel ranks exchange of a stage, in buckets: gradients, and weights that are sharded.

Buckets are filled in the order of backward, up to `Plan.bucket` bytes of weights; the embedding and the end
have buckets of their own, and with zero3 every block has one. A bucket is reduced over the shards and then
over the replicas, and gathered over the shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shoal.cost.layout import Layout
from shoal.cost.network import Group, collective_seconds
from shoal.cost.step import Costs
from shoal.plan import Plan
from shoal.simulate.passage import Collective, Exposed, Piece, Start, Wait
from shoal.simulate.within import Members
from shoal.workload import Block, Product

__all__ = ["Bucket", "Exchange", "parameters_of"]

_SUM_WIDTH = 4  # bytes of an element of a sum of gradients: fp32


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are reduced and gathered together.

    Attributes:
        name: As recorded spans call it.
        parameters: That the rank has of them.
        first: Position of its first block in the stage: where forward first needs it, and backward completes
            its gradients.
        last: Position of its last block: where backward first needs it.
    """

    name: str
    parameters: float
    first: int
    last: int


def parameters_of(block: Block, plan: Plan) -> int:
    """How many of a block's parameters a rank has under a Plan, before sharding."""
    held = block.parameters
    return held.whole + held.divided // plan.tp + held.experts // plan.ep


class Exchange:
    """The communications of one stage's gradients and weights.

    Args:
        plan: That is played.
        costs: Of its workload and cluster.
        stage: Number of the stage; handles of different stages differ by it.
        blocks: Of the stage, in order.
        members: Of the rank that is played.
    """

    def __init__(
        self, plan: Plan, costs: Costs, stage: int, blocks: Sequence[Block], members: Members
    ) -> None:
        self._plan = plan
        self._cluster = costs.cluster
        self._width = Layout.of(plan).width
        self._stage = stage
        self._members = members
        self._blocks = blocks
        ends = {id(costs.workload.embedding), id(costs.workload.end)}
        self.roots = tuple(position for position, block in enumerate(blocks) if id(block) in ends)
        self.buckets = tuple(self._fill())
        self.is_sharded = plan.shard != "none" and plan.shards * plan.cp > 1

    def reduce_at(self, position: int) -> list[Piece]:
        """Begins the buckets whose gradients are complete once backward has left that block."""
        return [
            piece for bucket in self.buckets if bucket.first == position for piece in self._reduce(bucket)
        ]

    def reduce_all(self) -> list[Piece]:
        """Begins all buckets."""
        return [piece for bucket in self.buckets for piece in self._reduce(bucket)]

    def wait_reduced(self) -> list[Piece]:
        """Waits for all sums."""
        return [
            Wait(starts[0].key, starts[-1].collective.name)
            for bucket in self.buckets
            if (starts := self._reduce(bucket))
        ]

    def gather(self, position: int) -> list[Piece]:
        """Begins to gather the buckets that a block needs first, by its position from the front."""
        return [self._gather(bucket) for bucket in self.buckets if bucket.last == position]

    def gather_all(self) -> list[Piece]:
        """Begins to gather all buckets: first the roots', for which forward waits at once."""
        roots = [bucket for bucket in self.buckets if bucket.first in self.roots]
        others = [bucket for bucket in self.buckets if bucket.first not in self.roots]
        return [self._gather(bucket) for bucket in (*roots, *reversed(others))]

    def wait_gathered(self, position: int) -> list[Piece]:
        """Waits for the weights of a block."""
        return [
            Wait(self._key("gather", bucket), f"all_gather:{bucket.name}")
            for bucket in self.buckets
            if bucket.first <= position <= bucket.last
        ]

    def naive(self) -> list[Piece]:
        """One all-reduce after another, of each weight of a product and of all else of a block together."""
        group = self._all
        return [
            Exposed(self._collective("all_reduce", each, count, _SUM_WIDTH, group))
            for block in reversed(self._blocks)
            for each, count in self._weights_of(block)
            if group.size > 1 and count
        ]

    def _weights_of(self, block: Block) -> list[tuple[str, float]]:
        weights = [
            (f"{block.name}.{each.name}", each.inputs * each.outputs / self._plan.tp)
            for each in block.operations
            if isinstance(each, Product) and each.copies == 1
        ]
        rest = parameters_of(block, self._plan) - sum(count for _, count in weights)
        return (
            [*weights, (block.name, rest)] if rest > 0 else [(block.name, parameters_of(block, self._plan))]
        )

    @property
    def _all(self) -> Group:
        """The ranks that have the same weights and other data."""
        return Group(self._plan.dp * self._plan.cp, self._plan.tp)

    @property
    def _shards(self) -> Group:
        return Group(self._plan.shards * self._plan.cp, self._plan.tp)

    @property
    def _replicas(self) -> Group:
        plan = self._plan
        return Group(plan.replicas, plan.tp * plan.cp * plan.shards)

    def _fill(self) -> list[Bucket]:
        """The buckets, in the order of backward."""
        filled: list[tuple[float, int, int]] = []  # parameters, first, last
        is_open = False
        by_block = self._plan.shard == "zero3"
        capacity = math.inf if by_block else self._plan.bucket / self._width
        for position in reversed(range(len(self._blocks))):
            count = float(parameters_of(self._blocks[position], self._plan))
            if not count:
                continue
            is_root = position in self.roots
            if is_open and not by_block and not is_root and filled[-1][0] + count <= capacity:
                filled[-1] = (filled[-1][0] + count, position, filled[-1][2])
                continue
            parts = 1 if by_block else math.ceil(count / capacity)
            filled += [(count / parts, position, position)] * parts
            is_open = not is_root
        return [Bucket(f"bucket {number}", *each) for number, each in enumerate(filled)]

    def _reduce(self, bucket: Bucket) -> list[Start]:
        start = partial(Start, self._key("reduce", bucket))
        count = bucket.parameters
        if not self.is_sharded:
            group = self._all
            return [start(self._of("all_reduce", bucket, count, group))] if group.size > 1 else []
        starts = [start(self._of("reduce_scatter", bucket, count, self._shards))]
        if self._replicas.size > 1:
            starts.append(start(self._of("all_reduce", bucket, count / self._shards.size, self._replicas)))
        return starts

    def _gather(self, bucket: Bucket) -> Start:
        gathered = self._collective("all_gather", bucket.name, bucket.parameters, self._width, self._shards)
        return Start(self._key("gather", bucket), gathered)

    def _of(self, operation: str, bucket: Bucket, count: float, group: Group) -> Collective:
        return self._collective(operation, bucket.name, count, _SUM_WIDTH, group)

    def _collective(self, operation: str, name: str, count: float, width: int, group: Group) -> Collective:
        nbytes = count * width
        seconds = collective_seconds(operation, nbytes, group, self._cluster)
        return Collective(f"{operation}:{name}", seconds, round(nbytes), self._members(group))

    def _key(self, what: str, bucket: Bucket) -> tuple[str, int, str]:
        return what, self._stage, bucket.name
