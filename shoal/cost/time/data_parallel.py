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

`shoal.simulate` plays what really happens, which takes as long or longer; a test holds that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.layout import Layout
from shoal.cost.time.block import BlockCost
from shoal.cost.time.bucket_times import bucket_times
from shoal.cost.time.buckets import Family, families_of
from shoal.cost.time.least import Passes
from shoal.cost.time.stage_buckets import Runs, StageBuckets, or_smaller, stage_buckets
from shoal.cost.time.wire import Wire
from shoal.plan import SettledPlan
from shoal.workload import Block, Workload


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
