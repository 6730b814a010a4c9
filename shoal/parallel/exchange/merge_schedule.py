"""The merges of local updates: what workers changed, fragment by fragment, and the outer optimizer.

When the fragments of a model are merged: rounds of steps, in each of which every fragment is merged once.

A round of H steps merges the first of n fragments after H / n of its steps, and the last after H. H is the
Plan's `every`; with `stretch` it grows, as the learning rate falls, with the square of the highest learning
rate over the present one (Gu et al., "A Quadratic Synchronization Rule", arXiv:2310.14423).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from shoal.parallel.communication import Axis, Pending, new_buffer
from shoal.parallel.exchange.compressed_sums import CompressedSum, sum_over
from shoal.parallel.local_shards import Owned, local_part
from shoal.parallel.parallel import Parallel
from shoal.spec.plan import Exchange


@dataclass(frozen=True, slots=True)
class ParameterVector:
    """This rank's parts of some parameters, which a vector holds one after another.

    Attributes:
        owned: The parts.
        device: Where they lie.
    """

    owned: Sequence[Owned]
    device: torch.device

    @property
    def elements(self) -> int:
        """Length of the vector."""
        return sum(each.local.numel() for each in self.owned)

    def new(self) -> torch.Tensor:
        """Return a vector `[elements]`, fp32, with undefined content."""
        return new_buffer(self.elements, dtype=torch.float32, device=self.device)

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a vector, `[rows, ...]` each."""
        parts = vector.split([each.local.numel() for each in self.owned])
        return [part.view(each.local.shape) for part, each in zip(parts, self.owned, strict=True)]

    def packed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a vector with these values."""
        vector = self.new()
        torch._foreach_copy_(self.views(vector), list(tensors))
        return vector


def vectors_of(parallel: Parallel, owned: Sequence[Owned]) -> list[ParameterVector]:
    """Return vectors that hold a rank's parts, in an order that is equal on all ranks.

    Parts of which other ranks of the worker hold copies, such as a norm's under tp, have vectors of their
    own, one for each set of ranks that hold equal parts. What a codec makes of an element, and in which order
    an all-reduce adds it up, depend on the whole vector: so these ranks' vectors are equal, and copies stay
    equal bit by bit.
    """
    held: dict[Hashable, list[Owned]] = {}
    for each in _in_order(parallel, owned):
        family, tied = each.family, each.family.tied_ranks
        holders = None
        if family.copies > 1:
            holders = family.replicate.members, None if tied is None else tied.members
        held.setdefault(holders, []).append(each)
    return [ParameterVector(parts, parallel.device) for parts in held.values()]


def fragments_of(parallel: Parallel, number: int) -> list[list[Owned]]:
    """Cut a rank's parts, from the last layer to the first, into fragments of about equally many elements.

    Each part is whole in one fragment. If there are fewer parts than fragments, some fragments are empty.
    Ranks that hold copies of a parameter have it in the same fragment: sizes are those of whole parameters,
    and what the first and the last pipeline stage share is in the first fragment.
    """
    owned = _in_order(parallel, parallel.owned)
    sizes = [_elements(parallel, each) for each in owned]
    total = sum(sizes) or 1
    cut: list[list[Owned]] = [[] for _ in range(number)]
    before = 0
    for each, size in zip(owned, sizes, strict=True):
        middle = before + size / 2
        is_tied = each.family.tied_ranks is not None
        cut[0 if is_tied else min(number - 1, int(middle * number / total))].append(each)
        before += size
    return cut


def _in_order(parallel: Parallel, owned: Sequence[Owned]) -> list[Owned]:
    """Return parts in the model's order, the last first: buckets may be cut otherwise on other ranks."""
    position = {name: number for number, (name, _) in enumerate(parallel.named_parameters())}
    return sorted(owned, key=lambda each: position[each.name], reverse=True)


def _elements(parallel: Parallel, owned: Owned) -> int:
    """Return a parameter's size, equal on all ranks that have a part of it; of experts, those of one rank."""
    is_expert = owned.family is parallel.axes.experts and owned.cut is not None
    return math.prod(owned.cut.block_shape if is_expert and owned.cut is not None else owned.shape)


@final
class Rounds:
    """The steps of a training with local updates.

    Args:
        exchange: The Plan's exchange.

    Attributes:
        step: Steps made.
        delay: Steps that a merge may take.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._first = 0  # steps made when the round began
        self._length = exchange.every
        self._rate = self._peak = 0.0
        self.step = 0
        self.delay = exchange.delay

    @property
    def is_dense(self) -> bool:
        """Whether the next step is one of the first, in which workers average gradients."""
        return self.step < self._exchange.dense

    @property
    def is_at_end(self) -> bool:
        """Whether all steps of the round were made."""
        return self.step >= self._first + self._length

    def advance(self) -> int | None:
        """Count a step; return the number of the fragment to merge after it, or None."""
        was_dense = self.is_dense
        self.step += 1
        if was_dense:
            self.begin()
            return None
        number = self._exchange.fragments
        ends = [(fragment + 1) * self._length // number for fragment in range(number)]
        made = self.step - self._first
        return ends.index(made) if made in ends else None

    @property
    def rates(self) -> tuple[float, float]:
        """The learning rate of the last step, and the highest of all: what the next round depends on."""
        return self._rate, self._peak

    def note(self, rate: float) -> None:
        """Take note of the learning rate of a step."""
        self._rate, self._peak = rate, max(self._peak, rate)

    def begin(self) -> None:
        """Begin a round, the longer the lower the learning rate of the last step is."""
        self._first = self.step
        share = self._rate / self._peak if self._peak > 0 else 1.0
        grown = self._exchange.every / max(share, 1e-6) ** 2
        self._length = int(min(grown, self._exchange.every * self._exchange.stretch))

    @property
    def span(self) -> tuple[int, int]:
        """The steps made when the round began, and its number of steps."""
        return self._first, self._length

    def set_step(
        self, steps: int, rates: tuple[float, float] = (0.0, 0.0), span: tuple[int, int] | None = None
    ) -> None:
        """Go on after this many steps, with what `rates` and `span` were then; None begins a round."""
        self.step = steps
        self._rate, self._peak = rates
        self.begin()
        if span is not None:
            self._first, self._length = span


_USUAL = 0.7, 0.9  # rate and momentum (Douillard et al., arXiv:2311.08105)
_SPARSE = 1.0, 0.5  # what a merge leaves out comes with later ones, as momentum does
_WARMUP = 20  # rounds


class Outer(NamedTuple):
    """Settings of the outer optimizer.

    In the first steps of a training gradients turn quickly, and what momentum remembers of them does harm. So
    it grows from 0 with the steps.

    Attributes:
        rate: Learning rate of the outer gradient.
        momentum: Nesterov momentum of the outer gradient.
        warmup: Rounds of the training in which the momentum grows; with 0 it is whole at once.
    """

    rate: float
    momentum: float
    warmup: int = _WARMUP

    def momentum_after(self, steps: float, every: int) -> float:
        """Return the momentum of a merge.

        Args:
            steps: Steps of the training before it.
            every: Steps of a round.
        """
        growing = self.warmup * every
        return self.momentum * min(1.0, steps / growing) if growing else self.momentum


def outer_settings(
    exchange: Exchange, rate: float | None = None, momentum: float | None = None, warmup: int | None = None
) -> Outer:
    """Return the settings of the outer optimizer.

    Args:
        exchange: How workers merge.
        rate, momentum, warmup: What is asked for; None for 0.7, 0.9 and 20, or with compression that leaves
            elements out for 1, 0.5 and 20.
    """
    usual = _SPARSE if exchange.leaves_out else _USUAL
    return Outer(
        usual[0] if rate is None else rate,
        usual[1] if momentum is None else momentum,
        _WARMUP if warmup is None else warmup,
    )


_States = defaultdict[Any, dict[str, Any]]


@final
class OuterState(Optimizer):
    """The anchor, the outer momentum and the error memory of each parameter, shaped as the parameter.

    Args:
        owned: This rank's parts of the parameters.
    """

    PREFIX = "outer_"
    """Beginning of the keys of this state alone."""

    def __init__(self, owned: Sequence[Owned]) -> None:
        super().__init__([each.parameter for each in owned], {})

    def step(self, closure: Any = None) -> Any:
        """Do nothing: `LocalUpdates` merges."""

    def anchor(self, owned: Owned) -> torch.Tensor:
        """Return the values `[rows, ...]` that all workers had after the last merge."""
        state = self.state[owned.parameter]
        if "outer_anchor" not in state:
            state["outer_anchor"] = owned.parameter.detach().clone()
        return local_part(state["outer_anchor"])

    def set_anchors(self, owned: Sequence[Owned]) -> None:
        """Make the present values the anchors."""
        for each in owned:
            self.anchor(each).copy_(each.local)

    def momentum(self, owned: Owned) -> torch.Tensor:
        """Return the momentum of the outer gradient, `[rows, ...]`; zeros at first."""
        state = self.state[owned.parameter]
        if "outer_momentum" not in state:
            state["outer_momentum"] = torch.zeros_like(owned.parameter, requires_grad=False)
        return local_part(state["outer_momentum"])

    def give_momentum(self, stepped: Optimizer, owned: Sequence[Owned]) -> None:
        """Give the momentum, where there is one, to the `SGD` that servers step."""
        for each in owned:
            if "outer_momentum" in self.state[each.parameter]:
                stepped.state[each.parameter]["momentum_buffer"] = self.momentum(each)

    def take_momentum(self, stepped: Optimizer, owned: Sequence[Owned]) -> None:
        """Take the momentum, where there is one, of the `SGD` that servers step."""
        for each in owned:
            momentum = stepped.state.get(each.parameter, {}).get("momentum_buffer")
            if momentum is not None:
                self.momentum(each).copy_(local_part(momentum))

    def error(self, owned: Owned) -> torch.Tensor | None:
        """Return what was left out of merges on all workers, `[rows, ...]`, when the state was saved."""
        error = self.state[owned.parameter].get("outer_error")
        return None if error is None else local_part(error)

    def set_error(self, owned: Owned, error: torch.Tensor) -> None:
        """Keep what was left out of merges on all workers, `[rows, ...]`, to be saved."""
        kept = torch.zeros_like(owned.parameter, requires_grad=False)
        local_part(kept).copy_(error)
        self.state[owned.parameter]["outer_error"] = kept

    def forget_errors(self, owned: Sequence[Owned]) -> None:
        """Forget what was left out of merges of these parameters."""
        for each in owned:
            self.state[each.parameter].pop("outer_error", None)


def is_key_of(optimizer: Optimizer, key: str) -> bool:
    """Return whether a state of this name belongs to an optimizer: to an `OuterState`, or to all others."""
    return key.startswith(OuterState.PREFIX) is isinstance(optimizer, OuterState)


def divided(states: Mapping[Any, Mapping[str, Any]]) -> tuple[_States, _States]:
    """Return the states of parameters that an `OuterState` has, and those of the workers' optimizers."""
    outer: _States = defaultdict(dict)
    inner: _States = defaultdict(dict)
    for parameter, state in states.items():
        for key, value in state.items():
            (outer if key.startswith(OuterState.PREFIX) else inner)[parameter][key] = value
    return outer, inner


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
