"""Replicated data parallel, ZeRO-1 and ZeRO-2: every rank computes with whole weights.

Gradients are summed in buckets, and a bucket's reduction runs during backward (Li et al., "PyTorch
Distributed", arXiv:2006.15704). The three differ in the state that a rank keeps:

    none     all: a bucket is all-reduced over the replicas (the mesh's axis `shard` has one rank)
    zero1    a shard of the optimizer's state: a bucket is reduce-scattered, so that each rank has the sum of
             its shard; after the optimizer's step weights are all-gathered, in the next forward
    zero2    a shard of the sums as well: each bucket's sum is freed as soon as it is reduced, and so each
             micro-batch is reduced

none and zero1 send 2 P (d - 1) / d elements per rank and step, for any number of micro-batches; zero2 reduces
once per micro-batch. Hybrid: the shard's sums are then all-reduced over the replicas. ZeRO: Rajbhandari et
al., arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import final

from shoal.parallel.axes import Axes
from shoal.parallel.data.blocks import groups_by_size
from shoal.parallel.data.compressed_bucket import CompressedBucket
from shoal.parallel.data.gradient import GradientReduction
from shoal.parallel.data.gradient_sum import GradientSum
from shoal.parallel.data.strategy import Setup, Strategy
from shoal.parallel.data.update import WeightUpdate
from shoal.parallel.owned import Frozen, Owned
from shoal.plan import Sharding


def resident(setup: Setup, sharding: Sharding) -> Strategy:
    """Return the strategy of a sharding that does not cut weights."""
    return _ResidentWeights(setup, sums_stay=not sharding.reduces_each_micro_batch)


@final
class _ResidentWeights(Strategy):
    """Whole weights on every rank, in buckets: gradients reduced in backward, weights gathered in forward.

    Args:
        setup: The model, its axes and its settings.
        sums_stay: Whether sums are kept whole over micro-batches, and reduced once; if not, each micro-batch
            is reduced.
    """

    def __init__(self, setup: Setup, *, sums_stay: bool) -> None:
        grouped = setup.buckets(partial(groups_by_size, capacity=setup.bucket), resident=True)
        buckets = [bucket for _, bucket in grouped]
        self._owned = [owned for bucket in buckets for owned in bucket.owned]
        self._frozen = setup.take_frozen()
        self.compressing = setup.compressing
        self._is_stage = setup.entry is not None
        self._sums_stay = sums_stay
        self._update = WeightUpdate(setup.entry or setup.model, setup.model, setup.blocks, buckets[::-1])
        self._accumulating = False
        self._step: ExitStack | None = None
        self._reduction = GradientReduction(
            buckets,
            finish=GradientSum.give if sums_stay else GradientSum.give_and_free,
            on_complete=GradientReduction.reduce_complete,
            on_end=self._on_end,
            waits=_may_wait(setup.axes, sums_stay=sums_stay),
            defers=sums_stay,  # otherwise the first backward would need the memory of all sums
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
        return None if self._update.is_fresh else "may be older than their owners' last change"

    def exchanges(self) -> Mapping[str, CompressedBucket]:
        """See `Strategy.exchanges`."""
        return self._reduction.exchanges()

    def start_step(self) -> None:
        """See `Strategy.start_step`."""
        self._update.start()
        if self._step is None:
            self._step = ExitStack()
            self._step.enter_context(self._update.unchanged())

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `Strategy.accumulate`."""
        self._accumulating = True
        try:
            with self._reduction.pause() if self._sums_stay else nullcontext():
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
        with self._reduction.pause():
            yield

    def start_reduction(self) -> None:
        """See `Strategy.start_reduction`."""
        self._reduction.start()

    def finish_reduction(self) -> None:
        """See `Strategy.finish_reduction`."""
        self._reduction.finish()

    def call_hooks(self) -> None:
        """See `Strategy.call_hooks`."""
        self._reduction.call_hooks()

    def gathered(self) -> AbstractContextManager[None]:
        """See `Strategy.gathered`."""
        return self._update.gathered()

    def unchanged(self) -> AbstractContextManager[None]:
        """See `Strategy.unchanged`."""
        return self._update.unchanged()

    def clear(self) -> None:
        """See `Strategy.clear`."""
        self._reduction.clear()
        self._end_step()
        self._update.mark()

    def changed(self) -> None:
        """See `Strategy.changed`."""
        self._end_step()
        self._update.mark_written()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None

    def _on_end(self) -> None:
        if self._accumulating or self._reduction.is_paused:
            self._update.keep()
        else:  # the optimizer step comes next
            self.note_step()
            self._end_step()
            self._update.mark()
            if not self._is_stage:
                self.call_hooks()


def _may_wait(axes: Axes, *, sums_stay: bool) -> bool:
    """Return whether a backward waits for its reductions.

    Waiting frees temporary memory, and lets sums over replicas begin early. Ranks that synchronise within a
    backward, over cp or ep, must not wait.
    """
    dense = axes.dense
    gains = not sums_stay or (dense.shard.size > 1 and dense.summed.size > 1)
    return gains and axes.cp.size == axes.ep.size == 1
