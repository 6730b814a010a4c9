"""Local updates: workers step by themselves, and every so many steps merge what their steps changed.

For each fragment of the model, with x the values that all workers had after the last merge and y_i those of
worker i now:

    d = mean_i (x - y_i)         the outer gradient, sent compressed if the Plan says so
    m = momentum m + d
    x = x - rate (d + momentum m)
    y_i = x

The momentum grows in the first rounds (`outer_settings.py`).

It is DiLoCo (Douillard et al., arXiv:2311.08105), with SparseLoCo's compression (Sarfi et al.,
arXiv:2508.15706). With rate 1 and momentum 0 it is local SGD (Stich, arXiv:1805.09767). Fragments are merged
in different steps (Streaming DiLoCo: Douillard et al., arXiv:2501.18512). If a merge takes `delay` steps,
workers go on meanwhile, and y_i keeps what these steps changed: y_i = y_i + (new x - y_i when it began).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim import Optimizer

from shoal.parallel.communication import Axis, Pending
from shoal.parallel.exchange.fragments import Fragment, fragments_of
from shoal.parallel.exchange.mean_gradient import average_gradients
from shoal.parallel.exchange.outer_settings import Outer, outer_settings
from shoal.parallel.exchange.outer_state import OuterState
from shoal.parallel.exchange.rounds import Rounds
from shoal.parallel.exchange.sums import CompressedSum, sum_over
from shoal.parallel.optimizer.composed import (
    Composed,
    OptimizerPart,
    copy_settings,
    loss_of,
    parts_of,
    title_of,
)
from shoal.parallel.owned import Owned, local_part
from shoal.parallel.parallel import Parallel
from shoal.plan import Exchange

__all__ = ["LocalUpdates"]


@final
class LocalUpdates(Composed):
    """Step an optimizer on each worker by itself, and merge the workers' values in rounds.

        optimizer = LocalUpdates(parallel, torch.optim.AdamW(parallel.parameters(), lr=4e-4))

    All workers call `step` or `pass_over` equally often.

    Args:
        parallel: The model; its Plan has `exchange=local` or `auto`.
        optimizer: The optimizer of each worker.
        outer: Settings of the outer optimizer; None: see `outer_settings`.
        exchange: When and how workers merge; None for what the Plan says.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: Optimizer,
        *,
        outer: Outer | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(optimizer.param_groups, {})
        exchange = parallel.plan.exchanged if exchange is None else exchange
        self._parallel = parallel
        self._inner = optimizer
        self._settings = outer_settings(exchange) if outer is None else outer
        self._every = exchange.every
        self._axis: Axis = parallel.axes.workers
        self._rounds = Rounds(exchange)
        self._fragments = fragments_of(parallel.owned, exchange.fragments)
        self._outer = OuterState(parallel.owned)
        self._sums: list[CompressedSum | None] = [
            sum_over(self._axis, exchange.compression, exchange.feedback, fragment.views)
            if exchange.compresses and self._axis.size > 1
            else None
            for fragment in self._fragments
        ]
        self._under_way: _Merge | None = None
        self._moved = torch.zeros(2, dtype=torch.float64, device=parallel.device)
        self._remember()

    @property
    def title(self) -> str:
        """See `Composed.title`."""
        return title_of(self._inner)

    @property
    def is_dense(self) -> bool:
        """Whether workers average gradients in the next step: call `average_gradients` after its backward."""
        return self._rounds.is_dense

    @property
    def has_merged(self) -> bool:
        """Whether all workers have equal values: after a dense step, and after the last merge of a round."""
        return self._rounds.is_at_start and self._under_way is None

    @property
    def rates(self) -> tuple[float, float]:
        """The learning rate of the last step, and the highest so far: `stretch` depends on them."""
        return self._rounds.rates

    def average_gradients(self) -> None:
        """Average the gradients over the workers; all ranks call it together."""
        average_gradients(self._parallel)

    def take_moved(self) -> torch.Tensor:
        """Return how far workers moved since the last call, on this rank's parts, `[2]`, fp64.

        The first number is the sum of squares of what this worker changed between merges, the second one that
        of the mean over workers, as it was sent. If workers moved alike they are equal; if each moved another
        way, the second is the first over the number of workers. Compression that leaves elements out makes
        the second one smaller.
        """
        moved, self._moved = self._moved, torch.zeros_like(self._moved)
        return moved

    def left_out(self) -> torch.Tensor:
        """Return the sum of squares of what compression left out on this rank, a scalar."""
        sums = [each for each in self._sums if each is not None]
        return sum([each.left_out() for each in sums], torch.zeros((), device=self._parallel.device))

    def agree(self, flags: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over the workers if they have merged in this step; else zeros.

        Workers that stop must stop after the same step, and only merges tell them of each other.
        """
        if not self.has_merged:
            return torch.zeros_like(flags)
        summed = flags.clone()
        self._axis.all_reduce(summed, "flags").wait()
        return summed

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this worker's optimizer, and merge what is due."""
        loss = loss_of(closure)
        copy_settings(self.param_groups, self._inner.param_groups)
        self._inner.step()
        self._advance()
        return loss

    @torch.no_grad()
    def pass_over(self) -> None:
        """Count a step that this worker leaves out, and merge what is due: other workers wait for it."""
        self._advance()
        self._parallel.changed()

    @torch.no_grad()
    def settle(self) -> None:
        """Make all workers equal: merge what they changed, and average their optimizers' states.

        Call it on all ranks before the state is saved. What compression left out is averaged too.
        """
        self._finish()
        if not self._rounds.is_at_start:
            for number in range(len(self._fragments)):
                self._start(number)
                self._finish()
            self._rounds.begin()
        self._average_states()
        self._parallel.changed()
        self.show()

    @torch.no_grad()
    def set_step(self, steps: int, rates: tuple[float, float] = (0.0, 0.0)) -> None:
        """Go on after this many steps, with the state that was loaded, and what `rates` was then."""
        self._rounds.set_step(steps, rates)
        self._remember()
        for fragment, summed in zip(self._fragments, self._sums, strict=True):
            errors = [error for each in fragment.owned if (error := self._outer.error(each)) is not None]
            if summed is not None:
                summed.take(fragment.packed(errors) if len(errors) == len(fragment.owned) else None)

    def parts(self, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
        """See `Composed.parts`."""
        return [*parts_of(self._inner, owned), (self._outer, owned)]

    def show(self) -> None:
        """See `Composed.show`."""
        if isinstance(self._inner, Composed):
            self._inner.show()
        self.state = defaultdict(
            dict,
            {
                each.parameter: {
                    **self._inner.state.get(each.parameter, {}),
                    **self._outer.state[each.parameter],
                }
                for each in self._parallel.owned
            },
        )

    def take(self) -> None:
        """See `Composed.take`."""
        copy_settings(self.param_groups, self._inner.param_groups)
        outer: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        inner: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for parameter, state in self.state.items():
            for key, value in state.items():
                (outer if key.startswith(OuterState.PREFIX) else inner)[parameter][key] = value
        self._outer.state, self._inner.state = outer, inner
        if isinstance(self._inner, Composed):
            self._inner.take()

    def _advance(self) -> None:
        """Count a step, end the merge that is due to end, and begin the one that is due to begin."""
        was_dense = self._rounds.is_dense
        self._rounds.note(float(self.param_groups[0]["lr"]))
        due = self._rounds.advance()
        if was_dense:
            self._remember()
            return
        if self._under_way is not None and self._rounds.step >= self._under_way.ends:
            self._finish()
        if due is not None:
            self._finish()
            self._start(due)
            if self._under_way is not None and self._under_way.ends == self._rounds.step:
                self._finish()
        if self._rounds.is_at_end:
            self._rounds.begin()

    @torch.no_grad()
    def _remember(self) -> None:
        """Take the present values, which are equal on all workers, for those after the last merge."""
        for owned in self._parallel.owned:
            self._outer.anchor(owned).copy_(owned.local)

    def _start(self, number: int) -> None:
        """Begin to merge a fragment."""
        fragment, summed = self._fragments[number], self._sums[number]
        vector = fragment.new()
        views = fragment.views(vector)
        for owned, view in zip(fragment.owned, views, strict=True):
            torch.sub(self._outer.anchor(owned), owned.local, out=view)
        self._moved[0] += vector.square().sum()
        given = vector.clone() if self._rounds.delay else None
        vector.div_(self._axis.size)
        name = f"fragment {number}"
        pending: Pending = (
            self._axis.all_reduce(vector, name)
            if summed is None
            else summed.start(vector, name, self._rounds.step)
        )
        self._under_way = _Merge(fragment, vector, given, pending, self._rounds.step + self._rounds.delay)

    def _finish(self) -> None:
        """End the merge that is under way, if there is one."""
        merge, self._under_way = self._under_way, None
        if merge is None:
            return
        merge.pending.wait()
        self._moved[1] += merge.vector.square().sum()
        rate, nesterov = self._settings.rate, self._settings.momentum_after(self._rounds.step, self._every)
        mean = merge.fragment.views(merge.vector)
        given = mean if merge.given is None else merge.fragment.views(merge.given)
        for owned, outer, own in zip(merge.fragment.owned, mean, given, strict=True):
            anchor, momentum = self._outer.anchor(owned), self._outer.momentum(owned)
            momentum.mul_(nesterov).add_(outer)
            if merge.given is not None:
                owned.local.sub_(anchor).add_(own)  # what changed since the merge began
            anchor.sub_(outer.add(momentum, alpha=nesterov), alpha=rate)
            if merge.given is not None:
                owned.local.add_(anchor)
            else:
                owned.local.copy_(anchor)

    def _average_states(self) -> None:
        """Average over the workers what their optimizers and compressions keep."""
        size = self._axis.size
        if size == 1:
            return
        pending = []
        for part, places in parts_of(self._inner, self._parallel.owned):
            for owned in places:
                for key, value in part.state.get(owned.parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        held = local_part(value)
                        sent = held.to(self._parallel.device, torch.float32, copy=True).contiguous()
                        pending.append((held, sent, self._axis.all_reduce(sent, f"state {key}")))
        for held, sent, one in pending:
            one.wait()
            held.copy_(sent.div_(size))
        for fragment, summed in zip(self._fragments, self._sums, strict=True):
            left = None if summed is None else summed.give_up(fragment.elements)
            if summed is None or left is None:
                continue
            self._axis.all_reduce(left, "error").wait()
            left.div_(size)
            summed.take(left)
            for owned, view in zip(fragment.owned, fragment.views(left), strict=True):
                self._outer.set_error(owned, view)


@dataclass(slots=True)
class _Merge:
    """A merge that is under way.

    Attributes:
        fragment: What is merged.
        vector: The outer gradient, once `pending` is waited for.
        given: What this worker changed before the merge began; None if the merge ends in the same step.
        pending: The exchange.
        ends: The step after which it ends.
    """

    fragment: Fragment
    vector: torch.Tensor
    given: torch.Tensor | None
    pending: Pending
    ends: int
