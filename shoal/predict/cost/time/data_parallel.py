"""Least exposed seconds in which data-parallel ranks combine gradients and gather weights: a lower bound.

Buckets (`buckets.py`) travel one after another, each as soon as it can: gradients after backward has made
them, weights before forward needs them. For one stage and micro-batch, whose forward and backward take F and
B seconds, these are exposed at least:

    reduce    All buckets take R seconds. Backward needs l_i seconds to complete bucket i, which and those
              after it take R_i. The buckets that are complete only when backward ends, `tail` seconds, are
              never hidden: max(c (R - tail) + tail, l_i + R_i - B for each i)
    gather    All buckets take G seconds, without those of embedding and end (`ends`), for which forward waits
              at once. The first bucket is hidden only by the embedding, and `after` seconds of forward come
              after the last:
              ends + max(c (G - first) + first, G - (F - after))

c is how much communication slows compute: the device's `contention` times the communication's load on the
device (1 at the innermost links' rate, less on slower links). A communication may also travel beside another
that stops compute, and slows nothing then: so the seconds of those within blocks are taken off what is
hidden. Gradients that are reduced in every backward (zero2, zero3) are first copied in fp32 to their bucket,
and then added to the rank's shard; these passes make backward longer. Where weights are gathered beside
gradients, each may fill the gaps of the other, so that only their sum or the gradients alone bound.

    none, zero1,  reduce once: without a pipeline beside the last backward; in a pipeline after a stage's last
    zero3-once    backward, which is the rank's last work for one of its stages
    zero1, zero2  gather once, when the step begins
    zero2, zero3  reduce in every backward
    zero3,        gather in every forward and backward; without a pipeline the embedding, the end and the
    zero3-once    last layer stay from forward to backward. A backward that gathers A seconds of weights and
                  reduces nothing takes longer by max(c A, A - `beside`), where `beside` are the seconds of
                  backward of the layers before the one that waits last

`shoal.predict.simulate` plays what really happens, which takes as long or longer; a test holds that.

Buckets of a stage
------------------

The buckets of one stage, and their seconds when nothing runs beside them.

Which blocks each bucket has depends on the stage's blocks, on tensor and expert parallelism, and on the size
of buckets: this is found once for all meshes. A mesh gives the ranks that communicate each family of
parameters. Most buckets of a stage are equal, and their seconds are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import NamedTuple

from shoal.predict.cost.collectives.network import collective_load
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.block import BlockCost
from shoal.predict.cost.time.buckets import (
    NOTHING,
    Bucket,
    BucketTimes,
    Family,
    Wire,
    bucket_times,
    families_of,
    fill,
    held_by_block,
)
from shoal.predict.cost.time.least import Passes
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import Block, Workload

Runs = tuple[tuple[Block, int], ...]
"""Blocks in order, each with the number of equal blocks that follow one another."""


@dataclass(frozen=True, slots=True)
class StageBuckets:
    """Seconds of one stage's buckets when nothing runs beside them, and the blocks that compute between them.

    Attributes:
        reduce: Seconds to reduce all gradients.
        last: Seconds to reduce the buckets that are complete when backward ends.
        meets: Buckets that others wait for: for each the blocks whose backward runs before it is complete,
            seconds that copies add to that, and seconds to reduce it and all after it.
        gather: Seconds to gather all weights without those of embedding and end.
        ends: Seconds to gather the weights of embedding and end.
        first: Seconds to gather the weights that the first layer needs.
        top: Seconds to gather the weights that the last layer needs.
        front: Blocks whose forward runs before the first layer's.
        behind: Blocks whose backward runs before the last layer's.
        after: Blocks whose forward runs after the last bucket has come.
        beside: Layers whose backward runs beside the gathers of a backward.
        reduce_load, gather_load: Mean load of reduce without `last`, and of gather without `first`, on the
            device (`network.collective_load`).
        reduce_loaded, gather_loaded: Seconds of all reduces and gathers, each times its load.
        most_load: Largest load of any of them.
        copy: Seconds that copies of gradients to buckets add to backward.
    """

    reduce: float
    last: float
    meets: tuple[tuple[Runs, float, float], ...]
    gather: float
    ends: float
    first: float
    top: float
    front: Runs
    behind: Runs
    after: Runs
    beside: Runs
    reduce_load: float
    gather_load: float
    reduce_loaded: float
    gather_loaded: float
    most_load: float
    copy: float


class _Kind(NamedTuple):
    """Equal buckets.

    Attributes:
        family: Number of the family of their parameters.
        parameters: Number of parameters of one bucket on the rank that are trained.
        number: Number of buckets that stand for one.
        frozen: Number of other parameters that are gathered with them.
    """

    family: int
    parameters: float
    number: int
    frozen: float


_Numbers = tuple[int, ...]
"""Kinds of buckets, by number."""


@dataclass(frozen=True, slots=True)
class _Order:
    """The buckets of a stage, whichever ranks communicate them.

    Attributes:
        kinds: The kinds of buckets.
        every, layers: Kinds of all buckets, and of those of layers, in the order of backward.
        first, top: Kinds of the buckets that the first layer needs, and of those that the last layer needs.
        places: For each position at which backward completes buckets: their kinds, the blocks whose backward
            has run by then, and those of them whose backward ran since the position before.
        front, behind, after, beside: See `StageBuckets`.
    """

    kinds: tuple[_Kind, ...]
    every: _Numbers
    layers: _Numbers
    first: _Numbers
    top: _Numbers
    places: tuple[tuple[_Numbers, Runs, Runs], ...]
    front: Runs
    behind: Runs
    after: Runs
    beside: Runs


def stage_buckets(
    runs: Runs,
    ends: tuple[Block, Block],
    families: tuple[Family, ...],
    tp: int,
    ep: int,
    width: int,
    bucket: int | None,
    cluster: Cluster,
    seconds: Callable[[Bucket], BucketTimes],
    *,
    copies: bool,
) -> StageBuckets:
    """Return the seconds of a stage's buckets.

    Args:
        runs: Blocks of the stage.
        ends: The model's embedding and end.
        families: The families of its parameters.
        tp, ep: Degrees of tensor and expert parallelism.
        width: Bytes of a weight that computes.
        bucket: Bytes of weights at which a bucket is closed; None if weights are cut: each block is a bucket.
        cluster: The machines.
        seconds: Function that gives the seconds of a bucket.
        copies: Whether gradients are cut, and so copied to their buckets in every backward.
    """
    capacity = None if bucket is None else bucket / width
    order = _order(runs, ends, tuple([each.kinds for each in families]), tp, ep, capacity)
    times = [
        seconds(Bucket(each.parameters, 0, 0, families[each.family], each.number, each.frozen))
        for each in order.kinds
    ]

    def together(numbers: _Numbers) -> BucketTimes:
        return BucketTimes(*map(sum, zip(NOTHING, *[times[each] for each in numbers], strict=True)))

    every, of_layers, last = together(order.every), together(order.layers), together(order.places[-1][0])
    first = together(order.first)
    return StageBuckets(
        reduce=every.reduce,
        last=last.reduce,
        meets=_meets(order, together, copies=copies),
        gather=of_layers.gather,
        ends=every.gather - of_layers.gather,
        first=first.gather,
        top=together(order.top).gather,
        front=order.front,
        behind=order.behind,
        after=order.after,
        beside=order.beside,
        reduce_load=_mean(every.reduce_loaded - last.reduce_loaded, every.reduce - last.reduce),
        gather_load=_mean(of_layers.gather_loaded - first.gather_loaded, of_layers.gather - first.gather),
        reduce_loaded=every.reduce_loaded,
        gather_loaded=every.gather_loaded,
        most_load=max((_most_load(families[each.family], cluster) for each in order.kinds), default=0.0),
        copy=every.copy if copies else 0.0,
    )


def or_smaller(found: StageBuckets, *, begins: bool, ends: bool) -> StageBuckets:
    """Return lower bounds on the seconds of these buckets, and of smaller ones, whose bytes take longer.

    Smaller ones can be hidden but for those of the embedding and the end, which are equal in any size.

    Args:
        found: The buckets.
        begins: Whether the first block is the embedding or the end.
        ends: Whether the last block is one of these.
    """
    hidden = found.gather - found.first
    return replace(
        found,
        last=found.last if begins else 0.0,
        reduce_load=found.reduce_load if begins else _mean(found.reduce_loaded, found.reduce),
        meets=found.meets[:1] if ends else (((), 0.0, found.reduce),),
        first=0.0,
        gather_load=_mean(found.gather_load * hidden, found.gather),
        front=(),
        after=(),
    )


def runs_of(blocks: Iterable[Block]) -> Runs:
    """Return blocks in order, equal neighbours as one run."""
    return tuple((block, sum(1 for _ in alike)) for block, alike in groupby(blocks))


@lru_cache(maxsize=1 << 13)
def _order(
    runs: Runs,
    ends: tuple[Block, Block],
    families: tuple[tuple[str, ...], ...],
    tp: int,
    ep: int,
    capacity: float | None,
) -> _Order:
    """Return the buckets of a stage.

    Args:
        runs: Blocks of the stage.
        ends: The model's embedding and end.
        families: The fields of `Parameters` that each family has.
        tp, ep: Degrees of tensor and expert parallelism.
        capacity: Parameters at which a bucket is closed; None if each block is a bucket.
    """
    blocks = [block for block, number in runs for _ in range(number)]
    roots = [position for position, block in enumerate(blocks) if block in ends]
    by_block = capacity is None
    held, frozen = held_by_block(blocks, tp, ep, by_block)
    filled = []
    for family, kinds in enumerate(families):
        counts, beside = (
            [sum([getattr(each, kind) for kind in kinds]) for each in of] for of in (held, frozen)
        )
        for size, first, last, number in fill(
            counts, roots, math.inf if capacity is None else capacity, by_block
        ):
            filled.append((first, last, _Kind(family, size - beside[first], number, beside[first])))
    filled.sort(key=lambda each: -each[0])
    numbers: dict[_Kind, int] = {}
    timed = [(first, last, numbers.setdefault(kind, len(numbers))) for first, last, kind in filled]
    layers = [each for each in timed if each[0] not in roots]
    lowest = min((first for first, _, _ in layers), default=0)
    highest = max((last for _, last, _ in layers), default=0)
    lowest_last = min((last for _, last, _ in layers), default=0)
    last_first = max((first for first, _, _ in layers), default=len(blocks))
    places, before = [], len(blocks)
    for first, there in groupby(timed, key=lambda each: each[0]):
        kinds_there = tuple([number for _, _, number in there])
        places.append((kinds_there, runs_of(blocks[first:]), runs_of(blocks[first:before])))
        before = first
    return _Order(
        kinds=tuple(numbers),
        every=tuple([number for _, _, number in timed]),
        layers=tuple([number for _, _, number in layers]),
        first=tuple([number for first, _, number in layers if first == lowest]),
        top=tuple([number for _, last, number in layers if last == highest]),
        places=tuple(places),
        front=runs_of(blocks[:lowest]),
        behind=runs_of(blocks[highest + 1 :]),
        after=runs_of(blocks[last_first:]),
        beside=runs_of(blocks[lowest_last + 1 : highest + 1]),
    )


def _meets(
    order: _Order, together: Callable[[_Numbers], BucketTimes], *, copies: bool
) -> tuple[tuple[Runs, float, float], ...]:
    """Return the first and the last of each run of equal buckets: between them the seconds grow evenly."""
    found: list[tuple[Runs, float, float]] = []
    known = {numbers: together(numbers) for numbers in {each for each, _, _ in order.places}}
    times = [known[numbers] for numbers, _, _ in order.places]
    copied, rest = 0.0, sum([each.reduce for each in times])
    last = len(times) - 1
    for number, ((numbers, lead, between), each) in enumerate(zip(order.places, times, strict=True)):
        copied += each.copy if copies else 0.0
        if number in (0, last) or not (
            _is_alike(order.places[number - 1], numbers, between)
            and _is_alike(order.places[number + 1], numbers, between)
        ):
            found.append((lead, copied, rest))
        rest -= each.reduce
    return tuple(found)


def _is_alike(place: tuple[_Numbers, Runs, Runs], numbers: _Numbers, between: Runs) -> bool:
    """Return whether a place has buckets of these kinds, after the backward of these blocks."""
    return place[0] == numbers and place[2] == between


def _most_load(family: Family, cluster: Cluster) -> float:
    """Return the larger of the loads of a family's communications on the device."""
    return max(collective_load(family.shards, cluster), collective_load(family.replicas, cluster))


def _mean(loaded: float, seconds: float) -> float:
    """Return the mean load of communications that take so many seconds."""
    return loaded / seconds if seconds > 0 else 0.0


class StageWork(NamedTuple):
    """One stage's blocks, and seconds for one micro-batch.

    Attributes:
        runs: Its blocks, in order.
        forward: Seconds of forward, with waits inside blocks.
        backward: Seconds of backward, with waits inside blocks.
        weight: Seconds of the weights' gradients, which are a part of backward.
        stops: Seconds of communication within forward, and within backward, that stop compute.
    """

    runs: Runs
    forward: float
    backward: float
    weight: float
    stops: tuple[float, float]


class ExchangeCost(NamedTuple):
    """What gradients and weights add to a stage, at least.

    Attributes:
        passes: Seconds of forwards and backwards, with what is exposed in every one.
        before: Exposed seconds of weights that the stage's first forward waits for.
        gathered: Seconds to gather all its weights once a step; 0 if they are not.
        after: Exposed seconds of gradients that are reduced once, after its last backward. Without a pipeline
            they are reduced beside that backward.
        beside_first: How much its communications of a step slow compute, if all run beside it: the seconds,
            and the most by which one second of communication slows compute. For a rank's first stage, whose
            gathers `before` counts.
        beside: How much they slow it for its other stages.
    """

    passes: Passes
    before: float = 0.0
    gathered: float = 0.0
    after: float = 0.0
    beside_first: tuple[float, float] = (0.0, 0.0)
    beside: tuple[float, float] = (0.0, 0.0)


class DataParallelCosts:
    """Bounds exposed data-parallel communication of a Workload on a Cluster; caches what Plans share.

    Args:
        workload: The work of the model that is trained.
        cluster: The machines that it runs on.
        cost: Function that gives the cost of a block under a layout.
        bounds_smaller: Whether buckets that are smaller than the Plan's have to be bounded too.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        cost: Callable[[Block, Layout], BlockCost],
        *,
        bounds_smaller: bool = False,
    ) -> None:
        self._bounds_smaller = bounds_smaller
        self._cluster = cluster
        self._cost = cost
        self._workload = workload
        self._ends = workload.embedding, workload.end
        self._buckets, self._times = cache(self._buckets_of), cache(partial(bucket_times, cluster=cluster))

    def of(self, plan: SettledPlan, stage: StageWork, has_halves: bool) -> ExchangeCost:
        """Return what gradients and weights add to a stage.

        Args:
            plan: The Plan.
            stage: The stage.
            has_halves: Whether the schedule makes backwards in two halves, of which the stage before waits
                for the first.
        """
        if plan.ranks == plan.pp:
            backward = stage.backward
            return ExchangeCost(
                Passes(stage.forward, backward, backward - stage.weight if has_halves else backward)
            )
        sharding, layout = plan.sharding, Layout.of(plan)
        found = self._buckets(
            stage.runs,
            families_of(plan),
            Wire.of(plan, self._workload),
            plan.tp,
            plan.ep,
            layout.width,
            None if sharding.cuts_weights else plan.bucket,
            sharding.cuts_gradients,
        )
        gathers = sharding.gathers_each_step
        forward, backward = self._in_passes(plan, found, stage, layout)
        backward += stage.backward
        back = stage.backward - stage.weight if has_halves else backward
        return ExchangeCost(
            Passes(stage.forward + forward, backward, back),
            self._before_forward(found, stage, layout) if gathers else 0.0,
            found.gather + found.ends if gathers else 0.0,
            self._after_step(plan, found, stage, layout),
            self._beside(plan, found, gathers=False),
            self._beside(plan, found, gathers=gathers),
        )

    def _in_passes(
        self, plan: SettledPlan, found: StageBuckets, stage: StageWork, layout: Layout
    ) -> tuple[float, float]:
        """Return the least exposed seconds in every forward and every backward of a stage."""
        if not plan.sharding.communicates_each_micro_batch:
            return 0.0, 0.0
        if not plan.sharding.cuts_weights:
            return 0.0, self._behind_backward(found, 0.0, 0.0, stage, layout)
        before, again = 0.0, found.gather - found.top
        if plan.pp > 1:
            before = found.ends + max(0.0, found.top - self._backward(found.behind, layout))
        if plan.sharding.reduces_each_micro_batch:
            behind = self._behind_backward(found, again, found.gather_load, stage, layout)
        else:
            behind = self._in_backward(found, again, stage, layout)
        return self._before_forward(found, stage, layout), before + behind

    def _beside(self, plan: SettledPlan, found: StageBuckets, *, gathers: bool) -> tuple[float, float]:
        """Return `ExchangeCost.beside`, with gathers once a step or without."""
        if plan.pp == 1:
            return 0.0, 0.0
        c, loaded = self._cluster.device.contention, found.gather_loaded if gathers else 0.0
        loaded += 0.0 if plan.sharding.reduces_each_micro_batch else found.reduce_loaded
        return c * loaded, c * found.most_load

    def _after_step(self, plan: SettledPlan, found: StageBuckets, stage: StageWork, layout: Layout) -> float:
        """Return `ExchangeCost.after`."""
        if plan.sharding.reduces_each_micro_batch:
            return 0.0
        if plan.pp > 1:
            return found.reduce
        if not plan.sharding.cuts_weights:
            return self._behind_backward(found, 0.0, 0.0, stage, layout)
        again = found.gather - found.top
        behind = self._behind_backward(found, again, found.gather_load, stage, layout)
        # _in_passes counts the latter
        return max(0.0, behind - self._in_backward(found, again, stage, layout))

    def _before_forward(self, found: StageBuckets, stage: StageWork, layout: Layout) -> float:
        c = self._cluster.device.contention
        hidden = found.gather - found.first
        first = max(0.0, found.first - self._forward(found.front, layout))
        left = stage.forward - self._forward(found.after, layout)
        slowed = c * max(0.0, found.gather_load * hidden - found.most_load * stage.stops[0])
        return found.ends + max(slowed + first, found.gather - left)

    def _behind_backward(
        self, found: StageBuckets, gathered: float, load: float, stage: StageWork, layout: Layout
    ) -> float:
        """Return the exposed seconds of gradients while weights take `gathered` seconds of the links."""
        contention = self._cluster.device.contention
        hidden = found.reduce - found.last
        most = contention * (found.reduce_load * hidden + load * gathered)
        stops = stage.stops[1]
        slowed = max(0.0, most - contention * found.most_load * stops)
        links = gathered + found.reduce if gathered else 0.0
        for lead, copies, rest in found.meets:
            links = max(links, self._backward(lead, layout) + copies + rest)
        return found.copy + max(slowed + found.last, links - stage.backward - found.copy)

    def _in_backward(self, found: StageBuckets, gathered: float, stage: StageWork, layout: Layout) -> float:
        """Return the exposed seconds of weights that take `gathered` seconds in a backward without sums."""
        c = self._cluster.device.contention
        slowed = c * max(0.0, found.gather_load * gathered - found.most_load * stage.stops[1])
        return max(slowed, gathered - self._backward(found.beside, layout))

    def _forward(self, runs: Runs, layout: Layout) -> float:
        return sum(self._cost(block, layout).forward * number for block, number in runs)

    def _backward(self, runs: Runs, layout: Layout) -> float:
        return sum(self._cost(block, layout).backward * number for block, number in runs)

    def _buckets_of(
        self,
        runs: Runs,
        families: tuple[Family, ...],
        wire: Wire,
        tp: int,
        ep: int,
        width: int,
        bucket: int | None,
        copies: bool,
    ) -> StageBuckets:
        """Return the seconds of the buckets of these blocks: see `stage_buckets`."""
        seconds = partial(self._times, width=width, wire=wire)
        found = stage_buckets(
            runs, self._ends, families, tp, ep, width, bucket, self._cluster, seconds, copies=copies
        )
        if not self._bounds_smaller or bucket is None:
            return found
        return or_smaller(found, begins=runs[0][0] in self._ends, ends=runs[-1][0] in self._ends)
