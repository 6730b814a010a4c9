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
from functools import partial
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.layout import Layout
from shoal.cost.time.block import BlockCost
from shoal.cost.time.bucket_times import BucketTimes, bucket_times
from shoal.cost.time.buckets import Bucket
from shoal.cost.time.stage_buckets import Runs, StageBuckets, or_smaller, runs_of, stage_buckets
from shoal.cost.time.wire import Wire
from shoal.plan import SettledPlan
from shoal.workload import Block, Workload

__all__ = ["DataParallelCosts", "Runs", "StageWork", "runs_of"]


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
        self._known: dict[tuple[object, ...], StageBuckets] = {}
        self._times: dict[tuple[object, ...], BucketTimes] = {}
        self._last: tuple[SettledPlan, Runs, StageBuckets] | None = None  # asked for several times

    def in_passes(self, plan: SettledPlan, stage: StageWork) -> tuple[float, float]:
        """Return the least exposed seconds in every forward and every backward of a stage."""
        if not plan.sharding.communicates_each_micro_batch or plan.ranks == plan.pp:
            return 0.0, 0.0
        layout = Layout.of(plan)
        found = self._buckets_of_stage(plan, stage, layout.width)
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

    def before_step(self, plan: SettledPlan, stage: StageWork) -> float:
        """Return the least exposed seconds of weights that a stage's first forward waits for."""
        if not plan.sharding.gathers_each_step or plan.ranks == plan.pp:
            return 0.0
        layout = Layout.of(plan)
        return self._before_forward(self._buckets_of_stage(plan, stage, layout.width), stage, layout)

    def gathered_each_step(self, plan: SettledPlan, stage: StageWork) -> float:
        """Return the seconds to gather all weights of a stage, once a step."""
        if not plan.sharding.gathers_each_step or plan.ranks == plan.pp:
            return 0.0
        found = self._buckets_of_stage(plan, stage, Layout.of(plan).width)
        return found.gather + found.ends

    def beside(self, plan: SettledPlan, stage: StageWork, *, is_first: bool) -> tuple[float, float]:
        """Return how much a stage's communications of a step slow compute, if all run beside it.

        Args:
            plan: The Plan.
            stage: A stage.
            is_first: Whether it is its rank's first stage, whose gathers `before_step` counts.

        Returns:
            The seconds, and the most by which one second of communication slows compute.
        """
        if plan.ranks == plan.pp or plan.pp == 1:
            return 0.0, 0.0
        found, c = self._buckets_of_stage(plan, stage, Layout.of(plan).width), self._cluster.device.contention
        loaded = found.gather_loaded if plan.sharding.gathers_each_step and not is_first else 0.0
        loaded += 0.0 if plan.sharding.reduces_each_micro_batch else found.reduce_loaded
        return c * loaded, c * found.most_load

    def after_step(self, plan: SettledPlan, stage: StageWork) -> float:
        """Return the least exposed seconds of gradients that are reduced once, after a stage's last backward.

        Without a pipeline they are reduced beside that backward.
        """
        if plan.sharding.reduces_each_micro_batch or plan.ranks == plan.pp:
            return 0.0
        layout = Layout.of(plan)
        found = self._buckets_of_stage(plan, stage, layout.width)
        if plan.pp > 1:
            return found.reduce
        if not plan.sharding.cuts_weights:
            return self._behind_backward(found, 0.0, 0.0, stage, layout)
        again = found.gather - found.top
        behind = self._behind_backward(found, again, found.gather_load, stage, layout)
        return max(
            0.0, behind - self._in_backward(found, again, stage, layout)
        )  # in_passes counts the latter

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

    def _buckets_of_stage(self, plan: SettledPlan, stage: StageWork, width: int) -> StageBuckets:
        if (last := self._last) is not None and plan is last[0] and stage.runs is last[1]:
            return last[2]
        size = 0 if plan.sharding.cuts_weights else plan.bucket
        mesh = (plan.tp, plan.cp, plan.ep, plan.dp, plan.replicate, plan.pp, plan.order)
        key = (stage.runs, mesh, plan.shard, size, width, plan.reduce, plan.compress, plan.exchange)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._of_buckets(plan, stage.runs, width)
        self._last = plan, stage.runs, found
        return found

    def _of_buckets(self, plan: SettledPlan, runs: Runs, width: int) -> StageBuckets:
        wire = Wire.of(plan, self._workload)
        seconds = partial(self._of_bucket, width=width, wire=wire)
        found = stage_buckets(plan, runs, self._ends, width, self._cluster, seconds)
        if not self._bounds_smaller or plan.sharding.cuts_weights:
            return found
        return or_smaller(found, begins=runs[0][0] in self._ends, ends=runs[-1][0] in self._ends)

    def _of_bucket(self, bucket: Bucket, width: int, wire: Wire) -> BucketTimes:
        key = bucket.family, bucket.parameters, bucket.frozen, bucket.number, width, wire
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = bucket_times(bucket, width, self._cluster, wire)
        return found
