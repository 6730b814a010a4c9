"""ZeRO-3: parameters are sharded too (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 3).

Communication: a block's weights are all-gathered before its forward and freed after it, all-gathered again
before its backward and freed after it, and its gradients are reduce-scattered. Each rank sends 3 P (d - 1) /
d elements for each micro-batch. With zero3-once gradients are added up whole in fp32 over the micro-batches,
and reduced in the last backward of a step: 2 P (d - 1) / d elements for each other one. The gather of the
next block runs while one block computes. The last block of a forward is the first of backward, so its weights
stay; the root's parameters stay for the whole of both. Weights that another pipeline stage of the rank uses
too, such as a tied embedding in a V schedule, stay from one forward of their own stage to the next: the other
stage finds them there and gathers nothing.

A backward that makes a graph of itself (`create_graph=True`) keeps all weights, for the backward that goes
through this graph, until the optimizer's step or the next forward after that.

All ranks gather every block and reduce its gradients at the same places, even a rank that leaves the block
out or lacks gradients of some of its parameters (`block_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch

from shoal.parallel.data.block_order import BlockOrder, Visits
from shoal.parallel.data.bucket import Bucket, CompressedBucket
from shoal.parallel.data.gradient_reduction import GradientReduction
from shoal.parallel.data.gradient_sum import GradientSum
from shoal.parallel.data.strategy import Setup, Strategy, groups_by_block
from shoal.parallel.local_shards import Frozen, Owned
from shoal.parallel.weight_hooks import require_no_gradient_transform
from shoal.spec.plan import Sharding


def zero3(setup: Setup, sharding: Sharding) -> Strategy:
    """Return the strategy of a sharding that cuts weights: they are whole only while a block computes."""
    return _ShardedWeights(setup, sums_stay=not sharding.reduces_each_micro_batch)


@final
class _ShardedWeights(Strategy):
    """Weights in buckets, one for each block, that are gathered for each pass of the block.

    Args:
        setup: The model, its axes and its settings.
        sums_stay: Whether sums are kept whole over micro-batches, and reduced once; if not, each micro-batch
            is reduced.
    """

    def __init__(self, setup: Setup, *, sums_stay: bool) -> None:
        self._sums_stay = sums_stay
        self.compressing = setup.compressing
        self._is_stage = setup.entry is not None
        self._storage = setup.storage
        # The positions of buckets whose gradients are reduced, by block; the last are the root's.
        self._positions: list[list[int]] = [[] for _ in range(len(setup.blocks) + 1)]
        held: list[list[Bucket]] = [[] for _ in self._positions]
        trained: list[Bucket] = []
        for position, (group, bucket) in enumerate(setup.buckets(groups_by_block, resident=False)):
            self._positions[group.blocks[0] if group.blocks else -1].append(position)
            held[group.blocks[0] if group.blocks else -1].append(bucket)
            trained.append(bucket)
        fixed = setup.take_frozen(floating=False)
        for group, bucket in setup.buckets(groups_by_block, resident=False, are_trained=False):
            held[group.blocks[0] if group.blocks else -1].append(bucket)
            fixed += bucket.frozen
        self._frozen = fixed
        *self._blocks, self._root = held
        self._buckets = [bucket for buckets in held for bucket in buckets]
        self._lent = [bucket for bucket in self._root if _has_any(bucket, setup.lent)]
        self._owned = [owned for bucket in trained for owned in bucket.owned]
        self._pinned: set[int] = set()  # blocks that the running forward pinned
        self._read: set[int] = set()  # blocks that a forward pinned and whose backward has not run yet
        self._held_open = 0
        self._is_stale = False  # weights that are held open: their owners may have changed since a gather
        self._is_written = False  # owners' parts changed, and earlier uses of weights are not out of date yet
        self._accumulating = False
        self._on_hold = False
        self._is_walking_back = False
        self._keeps_all = False  # a backward made a graph: a later backward goes through it, with all weights
        self._has_kept = False  # such a later backward has ended
        visits = Visits(
            begin_forward=self._begin_forward,
            come_forward=self._come_forward,
            leave_forward=self._leave,
            end_forward=self._end_forward,
            begin_backward=self._begin_backward,
            come_backward=self._come_backward,
            leave_backward=self._leave,
            settle=self._settle,
            recompute=lambda block: self._gather(self._blocks[block]),
            pin=self._pin,
            use_root=lambda: self._gather(self._root),
        )
        self._order = BlockOrder(setup.entry or setup.model, setup.blocks, visits)
        self._reduction = GradientReduction(
            trained,
            finish=GradientSum.give if sums_stay else GradientSum.give_and_free,
            before_end=self._end_backward,
            on_end=self._end_reduction,
        )

    @property
    def owned(self) -> Sequence[Owned]:
        """See `Strategy.owned`."""
        return self._owned

    @property
    def frozen(self) -> Sequence[Frozen]:
        """See `Strategy.frozen`."""
        return self._frozen

    @property
    def stale(self) -> str | None:
        """See `Strategy.stale`."""
        return None if self._held_open else "exist only while a forward or a backward needs them"

    def unchanged(self) -> AbstractContextManager[None]:
        """See `Strategy.unchanged`. Every forward gathers weights nevertheless."""
        return nullcontext()

    def exchanges(self) -> Mapping[str, CompressedBucket]:
        """See `Strategy.exchanges`."""
        return self._reduction.exchanges()

    def start_step(self) -> None:
        """See `Strategy.start_step`."""

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `Strategy.accumulate`. Weights are gathered nevertheless."""
        self._accumulating = True
        try:
            with nullcontext() if not self._sums_stay else self._reduction.pause():
                yield
        finally:
            self._accumulating = False

    @property
    def keeps_sums(self) -> bool:
        """See `Strategy.keeps_sums`."""
        return self._sums_stay

    @contextmanager
    def hold(self) -> Iterator[None]:
        """See `Strategy.hold`."""
        self._on_hold = True
        try:
            with self._reduction.pause():
                yield
        finally:
            self._on_hold = False

    def start_reduction(self) -> None:
        """See `Strategy.start_reduction`."""
        self._reduction.start()

    def finish_reduction(self) -> None:
        """See `Strategy.finish_reduction`."""
        self._reduction.finish()

    def call_hooks(self) -> None:
        """See `Strategy.call_hooks`."""
        self._reduction.call_hooks()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See `Strategy.gathered`."""
        if self._held_open:
            self._take_writes()
        self._count_write()
        self._drop_all()  # remaining weights may be older than the optimizer step
        self._held_open += 1
        try:
            self._refresh()
            self._gather(self._buckets)
            self._note_values(is_on=True)
            yield
        finally:
            self._held_open -= 1
            try:
                self._take_writes()
            finally:
                self._note_values(is_on=self._held_open > 0)
                self._is_stale &= self._held_open > 0
                self._drop_all()

    def clear(self) -> None:
        """See `Strategy.clear`."""
        self._is_walking_back = False
        self._keeps_all = self._has_kept = False
        self._order.clear()
        self._reduction.clear()
        self._read.clear()

    def changed(self) -> None:
        """See `Strategy.changed`. Weights are gathered anew in every forward."""
        self._is_written = True
        if self._held_open:
            self._is_stale = True
            self._take_writes()
        self._end_keeping()
        self._drop_all()

    # -- visits, in the order in which a step makes them --------------------------------------------

    def _begin_forward(self) -> None:
        self._count_write()
        self._end_keeping()
        self._drop_all()  # as in `gathered`
        self._refresh()
        if self._keeps_all:
            for bucket in self._buckets:
                bucket.start_gather()
        self._start(self._root)
        if self._blocks:
            self._start(self._blocks[0])
        self._gather(self._root)

    def _come_forward(self, block: int) -> None:
        self._gather(self._blocks[block])
        if block + 1 < len(self._blocks):
            self._start(self._blocks[block + 1])

    def _leave(self, block: int) -> None:
        if block < len(self._blocks) and block not in self._pinned and block not in self._read:
            for bucket in self._blocks[block]:
                self._drop(bucket)

    def _end_forward(self, has_graph: bool) -> None:
        if not has_graph:
            self._drop_own()

    def _begin_backward(self) -> None:
        self._is_walking_back = True
        self._reduction.begin()
        self._keeps_all |= self._reduction.makes_graph
        self._gather(self._root)  # another forward or backward may have freed it
        for block in sorted(self._read):
            self._gather(self._blocks[block])

    def _come_backward(self, block: int) -> None:
        self._gather(self._blocks[block])
        if block > 0:
            self._start(self._blocks[block - 1])

    def _settle(self, block: int) -> None:
        if block in self._read or self._keeps_all:
            return  # it is not known when its gradients are complete, so the end of backward reduces them
        if block < len(self._blocks):
            self._reduction.reduce(self._positions[block])
        else:
            self._reduction.reduce_early(self._positions[block])

    def _end_backward(self) -> None:
        from_other_stage = self._on_hold and not self._is_walking_back  # lent parameters got a gradient
        if not from_other_stage:
            self._order.end_backward()

    def _pin(self, block: int) -> None:
        self._pinned.add(block)
        if torch.is_grad_enabled():
            self._read.add(block)

    def _end_reduction(self) -> None:
        # If sums do not stay, a paused backward is the first of two halves, and the second one reduces.
        has_ended = not self._reduction.is_paused or (self._sums_stay and self._is_walking_back)
        self._is_walking_back = False
        self._has_kept |= not self._reduction.makes_graph
        if has_ended:
            self._read.clear()
            self._drop_own()
        if self._storage is not None:
            self._storage.settle()
        if not (self._accumulating or self._reduction.is_paused):
            self.note_step()
            if self._held_open:
                self._take_writes()
                self._is_stale = True
            if not self._is_stage:
                self.call_hooks()

    def _take_writes(self) -> None:
        for bucket in self._buckets:
            bucket.take_writes(are_current=not self._is_stale)

    def _note_values(self, *, is_on: bool) -> None:
        for bucket in self._buckets:
            bucket.note_values(is_on=is_on)

    def _refresh(self) -> None:
        """Gather the weights that are held open anew, if their owners may have changed."""
        if self._is_stale:
            for bucket in self._buckets:
                bucket.start_gather()
        self._is_stale = False

    def _count_write(self) -> None:
        if self._is_written:
            for bucket in self._buckets:
                bucket.count_write()
        self._is_written = False

    # -- what the visits do -------------------------------------------------------------------------

    @staticmethod
    def _start(buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.dropped:
                bucket.start_gather()

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        require_no_gradient_transform()
        self._start(buckets)
        for bucket in buckets:
            bucket.finish_gather()

    def _drop(self, bucket: Bucket) -> None:
        if not (self._held_open or self._keeps_all or bucket.dropped):
            bucket.drop_weights()

    def _end_keeping(self) -> None:
        if self._has_kept:
            self._keeps_all = self._has_kept = False

    def _drop_own(self) -> None:
        self._pinned.clear()
        for bucket in self._buckets:
            if bucket not in self._lent:
                self._drop(bucket)

    def _drop_all(self) -> None:
        self._pinned.clear()
        for bucket in self._buckets:
            self._drop(bucket)


def _has_any(bucket: Bucket, names: frozenset[str]) -> bool:
    return any(slot.name in names for slot in bucket.layout.slots)
