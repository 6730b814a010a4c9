"""Communication of one stage among data-parallel ranks: gradients, and sharded weights, by bucket.

A bucket is reduced over the shards and then over the replicas, and gathered over the shards.
`shoal.cost.time.buckets` says which parameters a bucket has, and over which ranks it goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.cost import Costs, Layout
from shoal.cost.collectives import collective_load, collective_seconds
from shoal.cost.time import (
    Bucket,
    Family,
    Sum,
    Wire,
    buckets_of,
    copy_seconds,
    families_of,
    parameters_on_rank,
)
from shoal.plan import SettledPlan
from shoal.plan.group import Group
from shoal.simulate.passage import Collective, Exposed, Piece, Start, Wait
from shoal.simulate.within import Members
from shoal.timeline import Purpose
from shoal.workload import Block, Parameters, Product


@dataclass(frozen=True, slots=True)
class _Named:
    """A bucket, and its name in recorded spans."""

    name: str
    bucket: Bucket


class DataParallel:
    """The communications of one stage's gradients and weights.

    Args:
        plan: The Plan that is played.
        costs: Costs of the Plan's workload on its cluster.
        stage: A number that no other stage of its rank has; handles of different stages differ by it.
        blocks: Blocks of the stage, in order.
        members: The groups of the rank that is played.
        is_named: Whether each of several equal buckets of a block has a span of its own; they take as long
            if they are one.
        exchanges: Whether gradients and weights are communicated.

    Attributes:
        parameters: Count of the stage's parameters that the rank holds.
        is_sharded: Whether any state of the stage is sharded.
        roots: Positions of the embedding and the end.
    """

    def __init__(
        self,
        plan: SettledPlan,
        costs: Costs,
        stage: int,
        blocks: Sequence[Block],
        members: Members,
        *,
        is_named: bool,
        exchanges: bool = True,
    ) -> None:
        self._plan = plan
        self._cluster = costs.cluster
        self._width = Layout.of(plan).width
        self._wire = Wire.of(plan, costs.workload)
        self._stage = stage
        self._members = members
        self._blocks = blocks
        ends = costs.workload.embedding, costs.workload.end
        self.roots = tuple(position for position, block in enumerate(blocks) if block in ends)
        filled = buckets_of(blocks, self.roots, plan, self._width) if exchanges else []
        if is_named:
            filled = [replace(bucket, number=1) for bucket in filled for _ in range(bucket.number)]
        self._buckets = tuple(_Named(f"bucket {number}", bucket) for number, bucket in enumerate(filled))
        self._by_first: dict[int, list[_Named]] = {}
        self._by_last: dict[int, list[_Named]] = {}
        self._of_block: dict[int, list[_Named]] = {}
        for named in self._buckets:
            self._by_first.setdefault(named.bucket.first, []).append(named)
            self._by_last.setdefault(named.bucket.last, []).append(named)
            for position in range(named.bucket.first, named.bucket.last + 1):
                self._of_block.setdefault(position, []).append(named)
        self._reduces: dict[str, list[Start]] = {}
        self._gathers: dict[str, Start] = {}
        self.parameters = parameters_on_rank(
            sum((block.parameters for block in blocks), Parameters()), plan.tp, plan.ep
        )
        self.is_sharded = any(bucket.family.shards.size > 1 for bucket in filled)

    def reduce_at(self, position: int) -> list[Piece]:
        """Begin the buckets whose gradients are complete after the backward of this block."""
        return [piece for bucket in self._by_first.get(position, ()) for piece in self._reduce(bucket)]

    def copy_at(self, position: int) -> float:
        """Return the seconds to copy the gradients that this block's backward completes to their buckets."""
        return math.fsum(
            copy_seconds(bucket.bucket, self._width, self._cluster, self._wire)
            for bucket in self._by_first.get(position, ())
        )

    def reduce_all(self) -> list[Piece]:
        """Begin to reduce all buckets."""
        return [piece for bucket in self._buckets for piece in self._reduce(bucket)]

    def wait_reduced(self) -> list[Piece]:
        """Wait for all reductions."""
        return [Wait(starts[0].key) for bucket in self._buckets if (starts := self._reduce(bucket))]

    def gather(self, position: int) -> list[Piece]:
        """Begin to gather the buckets that this block is the first to need; blocks count from the front."""
        return [self._gather(bucket) for bucket in self._by_last.get(position, ())]

    def gather_all(self) -> list[Piece]:
        """Begin to gather all buckets: first those of embedding and end, for which forward waits at once."""
        roots = [bucket for bucket in self._buckets if bucket.bucket.first in self.roots]
        others = [bucket for bucket in self._buckets if bucket.bucket.first not in self.roots]
        return [self._gather(bucket) for bucket in (*roots, *reversed(others))]

    def wait_gathered(self, position: int) -> list[Piece]:
        """Wait for the weights of a block."""
        if not self.is_sharded:
            return []
        return [Wait(self._key("gather", bucket)) for bucket in self._of_block.get(position, ())]

    def naive(self) -> list[Piece]:
        """Return all-reduces in sequence: one per product's weight, one for the rest of a block."""
        return [
            Exposed(self._collective("all_reduce", name, count, self._wire.width, family.replicas))
            for block in reversed(self._blocks)
            for family in families_of(self._plan)
            for name, count in self._weights_of(block, family)
            if family.replicas.size > 1 and count > 0
        ]

    def _weights_of(self, block: Block, family: Family) -> list[tuple[str, float]]:
        whole = family.count(parameters_on_rank(block.parameters, self._plan.tp, self._plan.ep))
        if "divided" not in family.kinds:
            return [(f"{block.name}.{family.kinds[-1]}", whole)]
        weights = [
            (f"{block.name}.{each.name}", each.inputs * each.outputs / self._plan.tp)
            for each in block.operations
            if isinstance(each, Product) and each.is_divided and not each.frozen
        ]
        rest = whole - sum(count for _, count in weights)
        return [*weights, (block.name, rest)] if rest >= 0 else [(block.name, whole)]  # a tied head has none

    def _reduce(self, named: _Named) -> list[Start]:
        found = self._reduces.get(named.name)
        if found is None:
            found = self._reduces[named.name] = self._sums(named)
        return found

    def _sums(self, named: _Named) -> list[Start]:
        bucket = named.bucket
        if not bucket.parameters:
            return []  # all of them are frozen
        sums = self._wire.sums(bucket.parameters, bucket.family.shards, bucket.family.replicas, self._cluster)
        return [self._start("reduce", named, self._named(each, named.name), each.group) for each in sums]

    def _named(self, sum_: Sum, name: str) -> Collective:
        ranks = self._members(sum_.group)
        return Collective(f"{sum_.operation}:{name}", sum_.seconds, round(sum_.nbytes), ranks, Purpose.DATA)

    def _gather(self, named: _Named) -> Start:
        found = self._gathers.get(named.name)
        if found is None:
            bucket = named.bucket
            shards = bucket.family.shards
            count = bucket.parameters + bucket.frozen
            gathered = self._collective("all_gather", named.name, count, self._width, shards)
            found = self._gathers[named.name] = self._start("gather", named, gathered, shards)
        return found

    def _start(self, what: str, named: _Named, collective: Collective, group: Group) -> Start:
        if named.bucket.number > 1:
            collective = replace(collective, seconds=named.bucket.number * collective.seconds)
        return Start(self._key(what, named), collective, collective_load(group, self._cluster))

    def _collective(self, operation: str, name: str, count: float, width: int, group: Group) -> Collective:
        nbytes = count * width
        seconds = collective_seconds(operation, nbytes, group, self._cluster)
        return Collective(f"{operation}:{name}", seconds, round(nbytes), self._members(group), Purpose.DATA)

    def _key(self, what: str, bucket: _Named) -> tuple[str, int, str]:
        return what, self._stage, bucket.name
