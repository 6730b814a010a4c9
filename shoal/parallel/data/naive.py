"""The reference: after backward, one all-reduce per parameter, waited for at once.

No buckets, no overlap, no buffers: slow and simple. The tests compare every strategy with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

import torch
from torch.autograd import Variable

from shoal.parallel.data.block_order import NO_BACKWARD
from shoal.parallel.data.gradient_sum import GradientHooks
from shoal.parallel.data.strategy import Setup, Strategy
from shoal.parallel.local_shards import Frozen, Owned


def naive(setup: Setup) -> Strategy:
    """Return the strategy with whole state on every rank, and gradients averaged singly after backward."""
    return _Naive(setup)


@final
class _Naive(Strategy):
    def __init__(self, setup: Setup) -> None:
        self._frozen = setup.take_frozen()
        self._families = {name: family for family, names in setup.families for name in names}
        self._cuts = setup.cuts
        self._named = [named for named in setup.model.named_parameters() if named[1].requires_grad]
        self._paused = False
        self._backward = NO_BACKWARD
        after: list[Callable[[torch.Tensor], None]] = []
        for name, parameter in self._named:
            first = torch.empty(parameter.shape, device=parameter.device)
            setup.first_values.fill(name, first)
            parameter.data = first
            # A hook that held this object would hold the parameter too, unseen by the garbage collector.
            ready: weakref.WeakMethod[Callable[[torch.Tensor], None]] = weakref.WeakMethod(self._ready)
            after.append(partial(_call, ready))
        self._is_stage = setup.entry is not None
        self._averaged: list[str] = []
        self._hooks = {
            owned.name: GradientHooks(owned, owned.parameter, lambda: None, each)
            for owned, each in zip(self.owned, after, strict=True)
        }

    @property
    def owned(self) -> Sequence[Owned]:
        """See `Strategy.owned`."""
        return [
            Owned(
                name,
                tuple(parameter.shape) if name not in self._cuts else self._cuts[name].shape,
                0,
                parameter.numel(),
                parameter,
                self._families[name],
                self._cuts.get(name),
            )
            for name, parameter in self._named
        ]

    @property
    def frozen(self) -> Sequence[Frozen]:
        """See `Strategy.frozen`."""
        return self._frozen

    @property
    def stale(self) -> None:
        """See `Strategy.stale`. The optimizer changes the model's own parameters."""

    def start_step(self) -> None:
        """See `Strategy.start_step`."""

    def accumulate(self) -> AbstractContextManager[None]:
        """See `Strategy.accumulate`."""
        return self._pause()

    @property
    def keeps_sums(self) -> bool:
        """See `Strategy.keeps_sums`."""
        return True

    def hold(self) -> AbstractContextManager[None]:
        """See `Strategy.hold`."""
        return self._pause()

    def start_reduction(self) -> None:
        """See `Strategy.start_reduction`."""

    def finish_reduction(self) -> None:
        """See `Strategy.finish_reduction`."""
        self._average()

    def call_hooks(self) -> None:
        """See `Strategy.call_hooks`."""
        averaged, self._averaged = self._averaged, []
        for name in reversed(averaged):
            self._hooks[name].call(None)

    def gathered(self) -> AbstractContextManager[None]:
        """See `Strategy.gathered`."""
        return nullcontext()

    def unchanged(self) -> AbstractContextManager[None]:
        """See `Strategy.unchanged`."""
        return nullcontext()

    def clear(self) -> None:
        """See `Strategy.clear`. The gradients are those of the model's own parameters."""

    def changed(self) -> None:
        """See `Strategy.changed`."""

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _ready(self, parameter: torch.Tensor) -> None:
        current = torch._C._current_graph_task_id()
        if current != self._backward and not self._paused:
            self._backward = current
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        for name, parameter in self._named:
            family = self._families[name]
            has_one = torch.tensor(float(parameter.grad is not None), device=parameter.device)
            family.summed.all_reduce(has_one, name).wait()
            if has_one.item() == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            family.summed.all_reduce(parameter.grad, name).wait()
            parameter.grad.mul_(family.factor)
            self._averaged.append(name)
        if not self._is_stage:
            self.call_hooks()


def _call(method: weakref.WeakMethod[Callable[[torch.Tensor], None]], parameter: torch.Tensor) -> None:
    called = method()
    if called is not None:
        called(parameter)
