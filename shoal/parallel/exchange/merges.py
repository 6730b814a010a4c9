"""The merges of local updates: what workers changed, fragment by fragment, and the outer optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from shoal.parallel.communication import Axis, Pending
from shoal.parallel.exchange.fragments import ParameterVector, fragments_of, vectors_of
from shoal.parallel.exchange.outer_settings import Outer
from shoal.parallel.exchange.outer_state import OuterState
from shoal.parallel.exchange.sums import CompressedSum, sum_over
from shoal.parallel.owned import Owned
from shoal.parallel.parallel import Parallel
from shoal.plan import Exchange


@final
class Merges:
    """Merge what workers changed; see `LocalUpdates` for the formulas. All ranks call it together.

    Args:
        parallel: The model.
        exchange: What is merged together, and how it is compressed.
        settings: Settings of the outer optimizer.

    Attributes:
        outer: The values after the last merge, the outer momentum, and what compression left out.
        apart: Numbers of the fragments in which workers may have unlike values.
    """

    def __init__(self, parallel: Parallel, exchange: Exchange, settings: Outer) -> None:
        self._parallel = parallel
        self._axis: Axis = parallel.axes.workers
        self._settings = settings
        self._every, self._delay = exchange.every, exchange.delay
        self._fragments = [
            [
                _Sent(each, self._sum_of(exchange, each))
                for each in vectors_of(parallel, owned)
                if each.elements
            ]
            for owned in fragments_of(parallel, exchange.fragments)
        ]
        self._under_way: _Merge | None = None
        self._moved = torch.zeros(2, dtype=torch.float64, device=parallel.device)
        self.outer = OuterState(parallel.owned)
        self.apart: set[int] = set()

    @property
    def ends(self) -> int | None:
        """The step after which the merge that is under way ends; None if there is none."""
        return None if self._under_way is None else self._under_way.ends

    def exchanges(self) -> Mapping[str, CompressedSum]:
        """Return the sums that are compressed, by name."""
        return {
            f"fragment {number} vector {place}": sent.sum
            for number, fragment in enumerate(self._fragments)
            for place, sent in enumerate(fragment)
            if sent.sum is not None
        }

    def take_moved(self) -> torch.Tensor:
        """See `LocalUpdates.take_moved`."""
        moved, self._moved = self._moved, torch.zeros_like(self._moved)
        return moved

    def part(self) -> None:
        """Note that each worker made a step by itself."""
        self.apart = set(range(len(self._fragments)))

    @torch.no_grad()
    def remember(self) -> None:
        """Take the present values, which are equal on all workers, for those after the last merge."""
        for owned in self._parallel.owned:
            self.outer.anchor(owned).copy_(owned.local)
        self.apart = set()

    def replace(self, owned: Owned, values: torch.Tensor) -> None:
        """Give all workers these values `[rows, ...]`, as if they had merged to them."""
        owned.local.copy_(values)
        self.outer.anchor(owned).copy_(values)

    def start(self, number: int, step: int) -> None:
        """Begin to merge a fragment after a step."""
        merge = _Merge(number, step, step + self._delay)
        for sent in self._fragments[number]:
            vector = sent.parameters.new()
            for owned, view in zip(sent.parameters.owned, sent.parameters.views(vector), strict=True):
                torch.sub(self.outer.anchor(owned), owned.local, out=view)
            self._moved[0] += vector.square().sum()
            given = vector.clone() if self._delay else None
            vector.div_(self._axis.size)
            name = f"fragment {number}"
            pending: Pending = (
                self._axis.all_reduce(vector, name)
                if sent.sum is None
                else sent.sum.start(vector, name, step)
            )
            merge.moved.append((sent.parameters, vector, given, pending))
        self._under_way = merge

    def finish(self, step: int) -> None:
        """End the merge that is under way, if there is one, after a step."""
        merge, self._under_way = self._under_way, None
        if merge is None:
            return
        rate, nesterov = self._settings.rate, self._settings.momentum_after(step, self._every)
        for parameters, vector, given, pending in merge.moved:
            pending.wait()
            self._moved[1] += vector.square().sum()
            mean = parameters.views(vector)
            owns = mean if given is None else parameters.views(given)
            for owned, outer, own in zip(parameters.owned, mean, owns, strict=True):
                anchor, momentum = self.outer.anchor(owned), self.outer.momentum(owned)
                momentum.mul_(nesterov).add_(outer)
                if given is not None:
                    owned.local.sub_(anchor).add_(own)  # what changed since the merge began
                anchor.sub_(outer.add(momentum, alpha=nesterov), alpha=rate)
                if given is not None:
                    owned.local.add_(anchor)
                else:
                    owned.local.copy_(anchor)
        if merge.began == step:
            self.apart.discard(merge.fragment)

    def drop(self) -> None:
        """Forget the merge that is under way, if there is one: other values were loaded."""
        merge, self._under_way = self._under_way, None
        for *_, pending in [] if merge is None else merge.moved:
            pending.wait()

    @torch.no_grad()
    def take_state(self) -> None:
        """Go on with `outer`: an equal part of what compression left out on each worker.

        The present values are those after the last merge where it has none.
        """
        for each in self._parallel.owned:
            self.outer.anchor(each)
        for sent in self._sent:
            owned = sent.parameters.owned
            errors = [error for each in owned if (error := self.outer.error(each)) is not None]
            if sent.sum is None:
                self.outer.forget_errors(owned)
            elif len(errors) == len(owned):
                sent.sum.take(sent.parameters.packed(errors).div_(self._axis.size))
            else:
                sent.sum.take(None)

    def share_errors(self) -> None:
        """Give each worker an equal part of what compression left out on all; keep the sum in the state."""
        for parameters, summed, left in self._left():
            self._axis.all_reduce(left, "error").wait()
            for owned, view in zip(parameters.owned, parameters.views(left), strict=True):
                self.outer.set_error(owned, view)
            summed.take(left.div_(self._axis.size))

    def forget(self, names: Collection[str]) -> None:
        """Forget the momentum of parameters, and what compression left out of them."""
        for owned in self._parallel.owned:
            if owned.name in names:
                self.outer.momentum(owned).zero_()
        for parameters, summed, left in self._left():
            for owned, view in zip(parameters.owned, parameters.views(left), strict=True):
                if owned.name in names:
                    view.zero_()
            summed.take(left)

    def _left(self) -> Iterator[tuple[ParameterVector, CompressedSum, torch.Tensor]]:
        """Yield what compression left out of vectors; the caller gives it back."""
        for sent in self._sent:
            left = None if sent.sum is None else sent.sum.give_up(sent.parameters.elements)
            if sent.sum is not None and left is not None:
                yield sent.parameters, sent.sum, left

    @property
    def _sent(self) -> list[_Sent]:
        return [sent for fragment in self._fragments for sent in fragment]

    def _sum_of(self, exchange: Exchange, vector: ParameterVector) -> CompressedSum | None:
        if not exchange.compresses or self._axis.size == 1:
            return None
        return sum_over(self._axis, exchange.compression, exchange.feedback, vector.views)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A vector of a fragment, and its sum over the workers where it is compressed."""

    parameters: ParameterVector
    sum: CompressedSum | None


@dataclass(slots=True)
class _Merge:
    """A merge that is under way.

    Attributes:
        fragment: Number of the fragment that is merged.
        began: The step after which it began.
        ends: The step after which it ends.
        moved: For each vector the parameters; the outer gradient, once the exchange is waited for; what this
            worker changed before the merge began, or None if it ends in the same step; and the exchange.
    """

    fragment: int
    began: int
    ends: int
    moved: list[tuple[ParameterVector, torch.Tensor, torch.Tensor | None, Pending]] = field(
        default_factory=list
    )
