"""The kinds of devices on which each stage of a Plan sits, where a Cluster has several.

Ranks fill a Cluster's parts in order. The ranks of place p along a pipeline of `pp` places, whose neighbours
are `stride` ranks apart, are those r with (r // stride) mod pp = p. All ranks of a place do the same work,
and wait for one another at each collective. So the devices of a place that take longest for a micro-batch of
all blocks bound it, and those with the least memory limit it. The optimizer waits for the devices that are
slowest with it. Each place costs what it would cost on a Cluster of such devices alone.

Links are those of the Cluster's levels, whichever parts they join. Each replica of the model counts as if it
had the slowest devices of every place, unless a Plan gives replicas shares of their own.

Groups that are alike
---------------------

The data-parallel ranks of a Plan as groups that are alike: equal numbers of micro-batches, equal devices.

With `shares` ranks along dp make different numbers of micro-batches. If they meet once a step, when gradients
are summed, the step takes as long as the slowest group would take if all ranks were like it. Each group is
therefore priced, bounded and played as a Plan without `shares` on uniform devices: the kind that a replica
waits for. If they meet in each micro-batch, they are padded, and all work like the one with most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from shoal.predict.cost.layout import Layout
from shoal.spec.cluster import Cluster, devices_of, every_device
from shoal.spec.plan import EQUAL, ByFields, Plan, SettledPlan
from shoal.spec.plan.allowed_values import AXES, DEFAULT_ORDER, strides_of

T = TypeVar("T")


def views_of(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return a uniform Cluster for each kind of device; a uniform Cluster alone is its own view."""
    if not cluster.parts:
        return (cluster,)
    return tuple(every_device(cluster, device) for device in devices_of(cluster))


class Kinds:
    """Where the kinds of a Cluster's devices are; kinds have the numbers that they have in `views_of`.

    Args:
        cluster: The Cluster.

    Attributes:
        number: Number of kinds.
    """

    def __init__(self, cluster: Cluster) -> None:
        devices = devices_of(cluster)
        self.number = len(devices)
        self._tightness = tuple(cluster.device.memory / device.memory for device in devices)
        self._is_plain = not cluster.parts
        self._bounds: list[tuple[int, int, int]] = []  # kind, first rank, rank after the last
        begin = 0
        for part in cluster.parts:
            self._bounds.append((devices.index(part.at_pace), begin, begin + part.devices))
            begin += part.devices
        self.of_pipeline = cache(self._of_pipeline)
        self.of_replicas = ByFields(self._of_replicas)

    def by_place(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """Return the kinds of each place along the pipeline of a Plan."""
        stride = plan.ranks // plan.pp
        if plan.order != DEFAULT_ORDER and plan.pp > 1:
            sizes = plan.pp, plan.replicas, plan.shards, plan.cp, plan.tp
            stride = strides_of(plan.order, dict(zip(AXES, sizes, strict=True)))["pp"]
        return self.of_pipeline(plan.pp, stride, plan.ranks)

    def _of_pipeline(self, pp: int, stride: int, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Return the kinds of each place along a pipeline.

        Args:
            pp: Number of places.
            stride: Ranks from one place to the next.
            ranks: Number of all ranks. If they are more than the Cluster has, the last part has the rest.
        """
        return tuple(self._of_place(place, pp, stride, ranks) for place in range(pp))

    def _of_replicas(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """Return the kinds of the ranks at each index along dp, for a Plan without a pipeline."""
        sets: list[set[int]] = [set() for _ in range(plan.dp)]
        sizes = 1, plan.replicas, plan.shards, plan.cp, plan.tp
        strides = strides_of(plan.order, dict(zip(AXES, sizes, strict=True)))
        for number, (kind, begin, end) in enumerate(self._bounds):
            stop = plan.ranks if number == len(self._bounds) - 1 else min(end, plan.ranks)
            for rank in range(begin, stop):
                replica = rank // strides["replicate"] % plan.replicas
                sets[replica * plan.shards + rank // strides["shard"] % plan.shards].add(kind)
        return tuple(tuple(sorted(each)) for each in sets)

    def tightness(self, kinds: Sequence[int]) -> float:
        """Return the memory of the Cluster's `device` over the least memory of these kinds; 1 if uniform."""
        return 1.0 if self._is_plain else max(self._tightness[kind] for kind in kinds)

    def _of_place(self, place: int, pp: int, stride: int, ranks: int) -> tuple[int, ...]:
        """Return the kinds of one place, in the order of `views_of`."""
        found = set()
        for number, (kind, begin, end) in enumerate(self._bounds):
            stop = ranks if number == len(self._bounds) - 1 else min(end, ranks)
            into = (begin - place * stride) % (pp * stride)  # from the start of the place's ranks
            first = begin if into < stride else begin + pp * stride - into
            if first < stop:
                found.add(kind)
        return tuple(sorted(found)) if found else (0,)


class ByKind(Generic[T]):
    """The costs on each kind of device, and those that bound each place along a pipeline.

    Of the kinds at a place, the one that takes longest for a micro-batch of all blocks bounds it.

    Args:
        kinds: Where the kinds are.
        costs: The costs on each kind.
        seconds: Function that gives the seconds of a micro-batch of all blocks, by these costs.

    Attributes:
        kinds: Where the kinds are.
    """

    def __init__(self, kinds: Kinds, costs: Sequence[T], seconds: Callable[[T, Layout], float]) -> None:
        self.kinds = kinds
        self._costs = tuple(costs)
        self._seconds = seconds
        self._seconds_of = cache(self._micro_batches)

    def all_at(self, plan: Plan | None = None, place: int = 0) -> tuple[T, ...]:
        """Return the costs on each kind of device, of all or of those at a place."""
        return (
            self._costs
            if plan is None
            else tuple(self._costs[kind] for kind in self.kinds.by_place(plan)[place])
        )

    def at(self, plan: SettledPlan, place: int) -> T:
        """Return the costs on those devices at a place that take longest."""
        return self.longest(Layout.of(plan), self.kinds.by_place(plan)[place])

    def longest(self, layout: Layout, kinds: tuple[int, ...] | None = None) -> T:
        """Return the costs on the kind, of these or of all, that takes longest under a layout."""
        seconds = self._seconds_of(layout)
        return self._costs[max(range(len(seconds)) if kinds is None else kinds, key=seconds.__getitem__)]

    def paces(self, plan: SettledPlan) -> list[float]:
        """Return, by place, the seconds of a micro-batch there over those on the first kind."""
        seconds = self._seconds_of(Layout.of(plan))
        return [max(seconds[kind] for kind in kinds) / seconds[0] for kinds in self.kinds.by_place(plan)]

    def _micro_batches(self, layout: Layout) -> list[float]:
        """Return the seconds of a micro-batch of all blocks on each kind."""
        return [self._seconds(each, layout) for each in self._costs]


class Alike(NamedTuple, Generic[T]):
    """Ranks with equal numbers of micro-batches on equal devices.

    Attributes:
        costs: The costs on their devices.
        plan: The Plan if all ranks were like them.
        batch: Samples of a step if all ranks were like them.
        first: Index along dp of the first of them.
        replicas: How many indices along dp they have.
    """

    costs: T
    plan: SettledPlan
    batch: int
    first: int
    replicas: int


def alike_of(costs: T, by_kind: ByKind[T] | None, plan: SettledPlan, batch: int) -> list[Alike[T]]:
    """Return the groups of ranks that are alike, in the order of their first ranks; all without `shares`.

    Args:
        costs: The costs on the Cluster.
        by_kind: The costs on each kind of its devices; None if it has one.
        plan: The Plan.
        batch: Samples of a step.
    """
    shares = plan.shared
    if shares is None:
        return [Alike(costs, plan, batch, 0, plan.dp)]
    equal = plan.replace(shares=EQUAL)
    if plan.is_padded:
        return [Alike(costs, equal, shares.most * plan.microbatch * plan.dp, 0, plan.dp)]
    layout = Layout.of(plan)
    kinds = ((),) * plan.dp if by_kind is None else by_kind.kinds.of_replicas(plan)
    numbers = [made for made, ranks in shares.runs for _ in range(ranks)]
    found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    for index, key in enumerate(zip(numbers, kinds, strict=True)):
        first, number = found.get(key, (index, 0))
        found[key] = first, number + 1
    return [
        Alike(
            costs if by_kind is None else by_kind.longest(layout, at),
            equal,
            made * plan.microbatch * plan.dp,
            first,
            replicas,
        )
        for (made, at), (first, replicas) in found.items()
    ]
