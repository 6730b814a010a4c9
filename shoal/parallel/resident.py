"""What the strategies share that keep whole weights on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import final

from shoal.parallel.blocks import groups_by_size
from shoal.parallel.bucket import Owned
from shoal.parallel.gradient import GradientReduction, GradientSum
from shoal.parallel.strategy import Setup, Strategy
from shoal.parallel.update import WeightUpdate

__all__ = ["ResidentWeights"]


@final
class ResidentWeights(Strategy):
    """Whole weights on every rank, in buckets: gradients reduced in backward, weights gathered in forward.

    Args:
        setup: What every strategy is given.
        finish: What becomes of a bucket's sum once it is reduced.
        sums_stay: Whether sums are kept whole over micro-batches, and reduced once; if not, each micro-batch
            is reduced.
    """

    def __init__(self, setup: Setup, *, finish: Callable[[GradientSum], None], sums_stay: bool) -> None:
        grouped = setup.buckets(partial(groups_by_size, capacity=setup.bucket), resident=True)
        buckets = [bucket for _, bucket in grouped]
        users = [[setup.blocks[index] for index in group.blocks] for group, _ in grouped]
        self._owned = [owned for bucket in buckets for owned in bucket.owned]
        self._sums_stay = sums_stay
        self._update = WeightUpdate(setup.entry or setup.model, list(zip(users, buckets, strict=True))[::-1])
        self._accumulating = False
        self._reduction = GradientReduction(
            buckets, finish=finish, on_complete=GradientReduction.reduce_complete, on_end=self._on_end
        )

    @property
    def owned(self) -> Sequence[Owned]:
        """See `Strategy.owned`."""
        return self._owned

    def start_step(self) -> None:
        """See `Strategy.start_step`."""
        self._update.start()

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

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See `Strategy.gathered`."""
        self._update.finish()
        yield

    def clear(self) -> None:
        """See `Strategy.clear`."""
        self._reduction.clear()

    def changed(self) -> None:
        """See `Strategy.changed`."""
        self._update.mark()

    def _on_end(self) -> None:
        if not self._accumulating:  # the optimizer's step comes next
            self._update.mark()
