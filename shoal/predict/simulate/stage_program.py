"""The passages of one stage: the pieces of each of its forwards and backwards.

Weights and gradients travel beside compute as in `shoal.parallel`:

    none    gradients are reduced bucket by bucket in the step's last backward (after it if pp > 1)
    zero1   as none; and when a step begins, the weights that the optimizer changed are gathered: all
            gathers begin at once, and each is waited for where the first forward needs it
    zero2   as zero1, but every backward reduces the gradients that it has copied in fp32 to buckets
    zero3   each block is gathered while the one before it computes, in forward and in backward, and reduced
            in every backward. Without a pipeline the forward's last block, the embedding and the end stay for
            the backward that follows. zero3-once gathers as zero3, and reduces as none

Communication of one stage among data-parallel ranks: gradients, and sharded weights, by bucket.

A bucket is reduced over the shards and then over the replicas, and gathered over the shards.
`shoal.predict.cost.time.buckets` says which parameters a bucket has, and over which ranks it goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from shoal.predict.cost import Costs, Layout
from shoal.predict.cost.collectives import collective_load, collective_seconds
from shoal.predict.cost.time import (
    Bucket,
    Family,
    Sum,
    Wire,
    buckets_of,
    copy_seconds,
    families_of,
    parameters_on_rank,
)
from shoal.predict.simulate.stage_pass import (
    Collective,
    Exposed,
    Members,
    Passage,
    Piece,
    Start,
    Wait,
    Within,
)
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.plan.schedules import Work
from shoal.spec.timeline import Purpose
from shoal.spec.workload import Block, Parameters, Product


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
