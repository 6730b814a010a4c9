"""Seconds of a micro-batch on the ranks of one replica, before a Plan is cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from shoal.predict.cost import Costs, Kinds, Layout
from shoal.predict.cost.time import BlockCost
from shoal.predict.planner.space import Degrees


class Passes(NamedTuple):
    """Seconds of a micro-batch."""

    forward: float
    backward: float


class Work(NamedTuple):
    """Seconds of a micro-batch on the ranks of one replica, forward and backward.

    Where devices differ, each block counts on those that are quickest with it: these are lower bounds.

    Attributes:
        total: Seconds of all blocks.
        embedding: Seconds of the embedding.
        layer: Mean seconds of a layer.
        end: Seconds of the end.
        least: Seconds of the quickest layer.
        blocks: Seconds of all blocks, forward and backward apart.
    """

    total: float
    embedding: float
    layer: float
    end: float
    least: Passes
    blocks: Passes


class Sums(NamedTuple):
    """Seconds of a micro-batch, summed over the layers before each place.

    Attributes:
        whole: Seconds of forward and backward.
        forward: Seconds of forward.
        chained: Seconds of forward, and of the half of backward that the stage before waits for.
        embedding, end: Seconds of the ends.
    """

    whole: Sequence[float]
    forward: Sequence[float]
    chained: Sequence[float]
    embedding: Passes
    end: Passes


_PassesOf = Callable[[BlockCost], Passes]


class Works:
    """The times of a Workload's blocks on all devices of a Cluster, cached by layout.

    Args:
        costs: Costs of both.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._kinds = tuple(Counter(costs.workload.pieces).items())
        self._kinds_of_devices = Kinds(costs.cluster)
        self._work, self._sums, self._ranks = (
            cache(self._work_of),
            cache(self._sums_of),
            cache(self._ranks_of),
        )

    def compute(self, layout: Layout) -> Work:
        """Return the times of blocks without the communication within them."""
        return self._work(layout, _compute)

    def of(self, layout: Layout) -> Work:
        """Return the times of blocks."""
        return self._work(layout, _whole)

    def on_first(self, layout: Layout) -> Work:
        """Return the times of blocks on the first kind of devices."""
        if self._kinds_of_devices.number == 1:
            return self.of(layout)
        return self._together(self._passes_of(layout, _whole)[0])

    def sums(self, layout: Layout) -> Sums:
        """Return sums over the layers, each on the devices that are quickest with it."""
        return self._sums(layout)

    def _sums_of(self, layout: Layout) -> Sums:
        layers, every = self._costs.workload.layers, self._costs.all_at()
        each = {
            layer: (
                min(cost.forward + cost.backward for cost in costs),
                min(cost.forward for cost in costs),
                min(cost.forward + cost.backward - cost.compute.weight for cost in costs),
            )
            for layer, _ in self._kinds[1:-1]
            for costs in [[on.block(layer, layout) for on in every]]
        }
        of_layers = [each[layer] for layer in layers]
        whole, forward, chained = (
            list(accumulate(column, initial=0.0)) for column in zip(*of_layers, strict=True)
        )
        ends = _least(self._passes_of(layout, _whole))
        return Sums(whole, forward, chained, ends[0], ends[-1])

    def ranks(self, degrees: Degrees, layout: Layout, *, only_compute: bool) -> float:
        """Return how many ranks of the quickest devices the places along the pipeline make, at most.

        Some place takes at least the total of `of` or `compute` over this number, however the model is cut.
        Let r be the least of the times of one kind's blocks over those of the quickest. A place of this kind
        that has x seconds of work takes r x or longer; so if all take T, the total is at most the sum of T /
        r. Without a pipeline the place has all blocks.
        """
        if self._kinds_of_devices.number == 1:
            return degrees.pp
        return self._ranks(degrees.pp, layout, _compute if only_compute else _whole)

    def _ranks_of(self, pp: int, layout: Layout, passes: _PassesOf) -> float:
        each = self._passes_of(layout, passes)
        least = [sum(block) for block in _least(each)]
        ratios = [
            [sum(block) / quickest for block, quickest in zip(kind, least, strict=True) if quickest]
            for kind in each
        ]
        ranks = self._costs.cluster.devices
        places = self._kinds_of_devices.of_pipeline(pp, ranks // pp, ranks)
        if pp > 1:
            return sum(1 / min(min(ratios[kind]) for kind in place) for place in places)
        totals = [self._total(kind) for kind in each]
        return self._total(_least(each)) / max(totals[kind] for kind in places[0])

    def _passes_of(self, layout: Layout, passes: _PassesOf) -> list[list[Passes]]:
        """Return, by kind of device, the times of each kind of block: the embedding, layers, the end."""
        return [
            [passes(costs.block(block, layout)) for block, _ in self._kinds] for costs in self._costs.all_at()
        ]

    def _total(self, each: Sequence[Passes]) -> float:
        return sum([sum(passes) * number for passes, (_, number) in zip(each, self._kinds, strict=True)])

    def _work_of(self, layout: Layout, passes: _PassesOf) -> Work:
        return self._together(_least(self._passes_of(layout, passes)))

    def _together(self, each: Sequence[Passes]) -> Work:
        total = self._total(each)
        first, *layers, last = each
        mean = (total - sum(first) - sum(last)) / len(self._costs.workload.layers)
        least = Passes(min([layer.forward for layer in layers]), min([layer.backward for layer in layers]))
        forward = backward = 0.0
        for passes, (_, number) in zip(each, self._kinds, strict=True):
            forward, backward = forward + number * passes.forward, backward + number * passes.backward
        return Work(total, sum(first), mean, sum(last), least, Passes(forward, backward))


def _compute(cost: BlockCost) -> Passes:
    """Return the times of a block without the communication within it."""
    return Passes(cost.compute.forward, cost.compute.backward)


def _whole(cost: BlockCost) -> Passes:
    """Return the times of a block."""
    return Passes(cost.forward, cost.backward)


def _least(each: Sequence[list[Passes]]) -> list[Passes]:
    """Return the least times of each block over all kinds of devices."""
    if len(each) == 1:
        return each[0]
    return [
        Passes(min(one.forward for one in block), min(one.backward for one in block))
        for block in zip(*each, strict=True)
    ]
