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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, final

from torch import nn

from shoal.errors import CommunicationError
from shoal.parallel.axes import Axes
from shoal.parallel.data.block_order import in_backward
from shoal.parallel.data.bucket import Bucket, CompressedBucket
from shoal.parallel.data.gradient_reduction import GradientReduction
from shoal.parallel.data.gradient_sum import GradientSum
from shoal.parallel.data.strategy import Setup, Strategy, groups_by_size
from shoal.parallel.local_shards import Frozen, Owned
from shoal.parallel.weight_hooks import between_graphs, watch, watch_calls
from shoal.spec.plan import Sharding


class WeightUpdate:
    """Gather every bucket's weights during a forward.

    Writes to the owners' parts cannot be observed: optimizers and users make them in many ways. So every
    forward begins with a gather, as in FSDP2. Exceptions are forwards between which nobody has reason to
    write: the micro-batches of a step, and those within `unchanged`.

    All gathers start when the model's forward begins, or earlier by `start`. Each is waited for at the first
    use of a weight of its bucket. Another method of the model may also use weights outside its forward. Then
    a new pass over the model begins when a module is used a second time.

    Args:
        entry: The module whose forward uses all the buckets' parameters.
        model: The model that owns them.
        blocks: Its repeated parts. All weights of a block are waited for when the block is called, so that a
            compiled block has one place to wait.
        buckets: The buckets, in forward order.
    """

    def __init__(
        self, entry: nn.Module, model: nn.Module, blocks: Sequence[nn.Module], buckets: Sequence[Bucket]
    ) -> None:
        self._buckets = [bucket for bucket in buckets if not bucket.is_current]
        self._current = [bucket for bucket in buckets if bucket.is_current and not bucket.whole]
        self._is_fresh = False  # gathered, and not written since
        self._is_written = False  # the owners' parts, since the last gather
        self._is_used = False  # a forward has used it since its gather, without a backward
        self._under_way = False
        self._unchanged = 0
        self._gathered = 0  # open calls of `gathered`
        self._forwards = 0  # open forwards of the model, nested
        self._seen: set[int] = set()
        if self._current:
            entry.register_forward_pre_hook(between_graphs(self._follow_assignments))
        if not self._buckets:
            return
        bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        entry.register_forward_pre_hook(between_graphs(self._before_model))
        entry.register_forward_hook(between_graphs(self._after_model), always_call=True)
        in_blocks = {module for block in blocks for module in block.modules()}
        for block in blocks:
            watch_calls(block, self._before_use(-1, _own(block.modules(), bucket_of)))
        for number, module in enumerate(model.modules()):
            own = _own([module], bucket_of)
            if own:
                before = self._before_use(number, own)
                watch(module, before, self._is_forward_open)
                if module not in in_blocks or isinstance(module, nn.RNNBase):
                    watch_calls(module, before)

    @property
    def is_fresh(self) -> bool:
        """Whether all weights equal their owners' as of the last likely change of these."""
        return not self._buckets or (self._is_fresh and not self._under_way)

    def mark(self) -> None:
        """Note that the owners' parts have changed, or are about to."""
        if self._gathered:
            self._take_writes()
        self._finish()
        self._is_fresh = self._is_used = False

    def mark_written(self) -> None:
        """Note that the owners' parts have changed, so that values made of the weights are old."""
        self._is_written = True
        self._is_fresh = False
        self.mark()

    def keep(self) -> None:
        """Note that a backward has ended after which the owners' parts do not change yet."""
        self._is_used = False

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Promise that the owners' parts do not change while this context lasts."""
        self._unchanged += 1
        try:
            yield
        finally:
            self._unchanged -= 1

    def refresh(self) -> None:
        """Update all weights now."""
        self._gather()
        self._finish()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Update all weights, and take what is written to them while this context lasts."""
        if self._gathered:
            self._take_writes()
        self._follow_assignments()
        self.refresh()
        self._note_values(is_on=True)
        self._gathered += 1
        try:
            with self.unchanged():
                yield
        finally:
            self._gathered -= 1
            try:
                self._take_writes()
            finally:
                self._note_values(is_on=self._gathered > 0)
                self._is_used = True  # owners may have been written too

    def _note_values(self, *, is_on: bool) -> None:
        for bucket in self._buckets:
            bucket.note_values(is_on=is_on)

    def _follow_assignments(self, *_: Any) -> None:
        for bucket in self._current:
            bucket.follow_assignments()
            bucket.take_writes(are_current=True)

    def _take_writes(self) -> None:
        for bucket in self._current:
            bucket.take_writes(are_current=True)
        for bucket in self._buckets:
            bucket.take_writes(are_current=self._is_fresh)

    def start(self) -> None:
        """Start the gathers, if somebody may have written since the last ones."""
        if not self._is_fresh or (self._is_used and not self._unchanged):
            self._gather()

    def _gather(self) -> None:
        for bucket in self._buckets:
            if self._is_written:
                bucket.count_write()
            bucket.start_gather()
        self._is_written = False
        self._is_fresh = self._under_way = True
        self._is_used = False
        self._seen.clear()

    def _finish(self) -> None:
        if self._under_way:
            for bucket in self._buckets:
                bucket.finish_gather()
            self._under_way = False

    def _before_model(self, module: nn.Module, arguments: Any) -> None:
        if in_backward():
            return
        self._forwards += 1
        if self._forwards == 1:
            self.start()

    def _after_model(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if in_backward():
            return
        self._forwards -= 1
        # Without an output the forward has raised, most often since a group is lost: one error is enough.
        with suppress(*([CommunicationError] if output is None else [])):
            self._finish()  # weights that this forward did not use
        self._is_used = True

    def _is_forward_open(self) -> bool:
        return self._forwards > 0 or self._is_used

    def _before_use(self, number: int, buckets: Sequence[Bucket]) -> Callable[[], None]:
        def wait() -> None:
            if self._under_way:
                for bucket in buckets:
                    bucket.finish_gather()
            if not self._forwards and number >= 0:
                self._outside(number)

        return wait

    def _outside(self, number: int) -> None:
        """Note that a module is used while the model's own forward does not run."""
        if in_backward():
            return
        if number in self._seen:
            self._is_used = True
        self.start()
        self._finish()
        self._seen.add(number)


def _own(modules: Iterable[nn.Module], bucket_of: Mapping[nn.Parameter, Bucket]) -> list[Bucket]:
    """Return the buckets of the modules' own parameters."""
    held = (each for module in modules for each in module._parameters.values() if each is not None)
    return list(dict.fromkeys(bucket_of[each] for each in held if each in bucket_of))


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
