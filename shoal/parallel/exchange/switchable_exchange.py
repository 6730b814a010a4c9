"""An exchange between workers that changes while a training runs.

Whoever guides the training says between two steps which exchange is followed from then on: gradients that are
averaged whole or compressed, or local updates. Between steps of the first two, and after the merges of the
third, all workers have equal values, and only then it may change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from shoal.parallel.exchange.local_updates import LocalUpdates, average_gradients
from shoal.parallel.exchange.merge_schedule import outer_settings
from shoal.parallel.exchange.worker_exchange import STEPS, WorkerUpdates
from shoal.parallel.optimizer.joined_optimizers import copy_settings
from shoal.parallel.parallel import Parallel
from shoal.spec.plan import SYNCHRONOUS, Exchange

_SAMPLE = 1 << 20
"""Elements of a gradient that are looked at."""


class Averaged(NamedTuple):
    """Gradients that workers averaged after a backward.

    Attributes:
        norm: Norm of this worker's own gradient, a scalar.
        sample: The first elements of this rank's part of it, `[elements]`, fp32.
        seconds: Seconds of the average.
    """

    norm: torch.Tensor
    sample: torch.Tensor
    seconds: float


@final
class GuidedUpdates(WorkerUpdates):
    """Step an optimizer, and exchange with other workers in the way that is followed at the time.

    At first workers average whole gradients. Its state is that of the optimizer: local updates begin anew
    whenever they are followed.

    Args:
        parallel: The model; its Plan has `exchange=auto`.
        optimizer: The optimizer of each worker.
        rate, momentum, warmup: Settings of the outer optimizer of local updates; None: see `outer_settings`.

    Attributes:
        steps: Steps made.
        averaged: What the last `average_gradients` averaged; None before the first.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: Optimizer,
        *,
        rate: float | None = None,
        momentum: float | None = None,
        warmup: int | None = None,
    ) -> None:
        super().__init__(parallel, optimizer)
        self._outer = rate, momentum, warmup
        self._local: LocalUpdates | None = None
        self._is_dense = False
        self.steps = 0
        self.averaged: Averaged | None = None

    @property
    def local(self) -> LocalUpdates | None:
        """The local updates that are followed; None with another exchange."""
        return self._local

    @property
    def is_dense(self) -> bool:
        """Whether workers average gradients after the next backward: call `average_gradients` then."""
        return self._is_dense

    @property
    def has_merged(self) -> bool:
        """Whether all workers have equal values."""
        return self._local is None or self._local.has_merged

    @torch.no_grad()
    def follow(self, exchange: Exchange) -> None:
        """Exchange in another way from the next step on; all ranks call it, after a merge.

        Args:
            exchange: Gradients, whole or compressed, in each step (bucketed), or local updates.
        """
        if self._local is not None:
            self._local.settle()
        self._follow(exchange)

    def average_next(self) -> None:
        """Make the next step average gradients after its backward, not beside it; all ranks call it.

        The backward then leaves this worker's own gradient. Local updates are not followed at the time.
        """
        assert self._local is None
        self._is_dense = self._parallel.axes.reach.is_apart = True

    def average_gradients(self) -> None:
        """Average the gradients over the workers; all ranks call it together."""
        device = self._parallel.device
        norm = self._parallel.measure_gradient().whole
        parts = [part.flatten() for each in self._parallel.owned if (part := each.gradient) is not None]
        sample = torch.cat(parts)[:_SAMPLE].float() if parts else torch.zeros(0, device=device)
        began = _now(device)
        average_gradients(self._parallel)
        self.averaged = Averaged(norm, sample, _now(device) - began)

    def left_out(self) -> torch.Tensor:
        """Return the sum of squares of what compression left out on this rank, a scalar."""
        if self._local is not None:
            return self._local.left_out()
        sums = [
            each.sum.left_out()
            for strategy in self._parallel.strategies
            for each in strategy.exchanges().values()
            if each.sum is not None
        ]
        return sum(sums, torch.zeros((), device=self._parallel.device))

    def agree(self, flags: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over the workers, if this step did not sum it already.

        Between merges of local updates it is zeros.
        """
        if self._local is not None:
            return self._local.agree(flags)
        if not self._is_dense:
            return flags
        self._is_dense = self._parallel.axes.reach.is_apart = False
        summed = flags.clone()
        self._parallel.axes.workers.all_reduce(summed, "flags").wait()
        return summed

    def make_step(self) -> None:
        """Step this worker's optimizer, and merge what is due."""
        self.steps += 1
        if self._local is not None:
            copy_settings(self.param_groups, self._local.param_groups)
            self._local.step()
        else:
            self._inner.step()

    def pass_over(self) -> None:
        """Count a step that is left out: with local updates other workers wait for this one's merges."""
        self.steps += 1
        if self._local is not None:
            self._local.pass_over()

    def settle(self) -> None:
        """Make all workers equal; call it on all ranks before the state is saved."""
        if self._local is not None:
            self._local.settle()
            self.show()

    def set_step(self, steps: int) -> None:
        """Go on after this many steps, with the state that was loaded, and average whole gradients."""
        self.steps = steps
        self._follow(self._parallel.plan.replace(**SYNCHRONOUS).exchanged)

    def end(self) -> None:
        """See `WorkerExchange.end`."""
        self.settle()

    def to_save(self) -> dict[str, Any]:
        """See `WorkerExchange.to_save`."""
        return {STEPS: self.steps}

    def load(self, steps: int, state: Mapping[str, Any]) -> None:
        """See `WorkerExchange.load`."""
        self.set_step(steps)

    def _follow(self, exchange: Exchange) -> None:
        self._parallel.axes.reach.is_apart = exchange.merges
        for strategy in self._parallel.strategies:
            if strategy.compressing is not None:
                strategy.compressing.follow(exchange)
        self._local = None
        if exchange.merges:
            outer = outer_settings(exchange, *self._outer)
            self._local = LocalUpdates(self._parallel, self._inner, exchange=exchange, outer=outer)
            self._local.set_step(self.steps)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
