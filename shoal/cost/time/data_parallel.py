"""Exposed seconds in which data-parallel ranks combine gradients and gather weights, in closed form.

Buckets (`buckets.py`) travel one after another, each as soon as it can: gradients after backward has made
them, weights before forward needs them. For one stage and micro-batch, whose forward and backward take F and
B seconds:

    reduce    All buckets take R seconds. Backward needs `lead` seconds to complete the first bucket. The
              buckets that are complete only when backward ends, `tail` seconds, are never hidden:
              max(c (R - tail) + tail, lead + R - B)
    gather    All buckets take G seconds, without those of embedding and end (`ends`), for which forward waits
              at once. The first bucket is never hidden, and `after` seconds of forward come after the last:
              ends + max(c (G - first) + first, G - (F - after))

c is how much communication slows compute, as a share of the communication's seconds: the device's
`contention`, times the communication's load on the device (1 at the innermost links' rate, less on slower
links), times the share of compute in F + B. Gradients that are reduced in every backward (zero2, zero3) are
first copied in fp32 to their bucket, and then added to the rank's shard; these passes make backward longer.
With the other shardings, products may add to the sums themselves. A backward that gathers A seconds of
weights and reduces nothing takes longer by max(c A, A - `beside`), where `beside` are the seconds of backward
of the layers before the one that waits last. With m micro-batches and a pipeline of p ranks with v stages
each:

    none, zero1,  reduce once. Without a pipeline this runs beside the last backward. In a pipeline a stage
    zero3-once    begins after its last backward: the reduce of the rank's first stage is exposed, and those
                  of its other v - 1 stages run beside the min(m, p) (v - 1) / v backwards that are left
    zero1, zero2  gather once, when the step begins
    zero2, zero3  reduce in every backward
    zero3,        gather in every forward and backward; without a pipeline the embedding, the end and the
    zero3-once    last layer stay from forward to backward

In a pipeline, later ranks wait for their first forward, and end before the first rank unless the schedule
fills that time. Communication that they do once in a step has this additional time. Seconds that are exposed
in every micro-batch are also exposed in the (p - 1) / v micro-batches that fill the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.layout import Layout
from shoal.cost.time.block import BlockCost
from shoal.cost.time.bucket_times import NOTHING, BucketTimes, bucket_times, sent_width, together
from shoal.cost.time.buckets import Bucket, buckets_of
from shoal.plan import SettledPlan
from shoal.workload import Block, Workload

__all__ = ["DataParallelCosts", "Runs", "StageWork", "runs_of"]

Runs = tuple[tuple[Block, int], ...]
"""Blocks in order, each with the number of equal blocks that follow one another."""


class StageWork(NamedTuple):
    """One stage's blocks, and seconds for one micro-batch.

    Attributes:
        runs: Its blocks, in order.
        forward: Seconds of forward, with waits inside blocks.
        backward: Seconds of backward, with waits inside blocks.
        computed: Share of these seconds in which the device computes.
    """

    runs: Runs
    forward: float
    backward: float
    computed: float


@dataclass(frozen=True, slots=True)
class _BucketsOfStage:
    """Seconds of one stage's buckets when nothing runs beside them, and the blocks that compute between them.

    Attributes:
        reduce: Seconds to reduce all gradients.
        last: Seconds to reduce the buckets that are complete when backward ends.
        before: Seconds to reduce the buckets that are complete just before those.
        between: Blocks whose backward runs between these two.
        lead: Blocks whose backward runs before the first bucket is complete.
        gather: Seconds to gather all weights without those of embedding and end.
        ends: Seconds to gather the weights of embedding and end.
        first: Seconds to gather the weights that the first layer needs.
        top: Seconds to gather the weights that the last layer needs.
        after: Blocks whose forward runs after the last bucket has come.
        beside: Layers whose backward runs beside the gathers of a backward.
        reduce_load, gather_load: Mean load of reduce and gather on the device (`network.collective_load`).
        copy, copy_first, copy_last: Seconds that copies of gradients to buckets add to backward, to `lead`
            and to `between`.
    """

    reduce: float
    last: float
    before: float
    between: Runs
    lead: Runs
    gather: float
    ends: float
    first: float
    top: float
    after: Runs
    beside: Runs
    reduce_load: float
    gather_load: float
    copy: float
    copy_first: float
    copy_last: float


class DataParallelCosts:
    """Computes exposed data-parallel communication of a Workload on a Cluster; caches what Plans share.

    Args:
        workload: The work of the model that is trained.
        cluster: The machines that it runs on.
        cost: Function that gives the cost of a block under a layout.
    """

    def __init__(
        self, workload: Workload, cluster: Cluster, cost: Callable[[Block, Layout], BlockCost]
    ) -> None:
        self._cluster = cluster
        self._cost = cost
        self._ends = {workload.embedding, workload.end}
        self._known: dict[tuple[object, ...], _BucketsOfStage] = {}
        self._times: dict[tuple[object, ...], BucketTimes] = {}

    def in_micro_batch(self, plan: SettledPlan, stages: Sequence[StageWork]) -> float:
        """Return the exposed seconds in every micro-batch of a rank with these stages."""
        if not plan.sharding.communicates_each_micro_batch or plan.ranks == plan.pp:
            return 0.0
        return sum(number * self._in_passes(plan, stage) for stage, number in Counter(stages).items())

    def in_step(self, plan: SettledPlan, stages: Sequence[StageWork], count: int) -> tuple[float, float]:
        """Return the exposed seconds once in a step: before all compute of a rank, and after it.

        Args:
            plan: The Plan that it runs under.
            stages: Stages of the rank, in order.
            count: Number of micro-batches in a step.
        """
        if plan.ranks == plan.pp:
            return 0.0, 0.0
        c = self._cluster.device.contention
        layout = Layout.of(plan)
        found = [self._buckets_of_stage(plan, stage, layout.width) for stage in stages]
        before = after = 0.0
        if plan.sharding.gathers_each_step:
            before = self._before_forward(found[0], stages[0], layout)
            before += c * sum(each.gather_load * (each.gather + each.ends) for each in found[1:])
        if not plan.sharding.reduces_each_micro_batch:
            if plan.pp == 1:
                after = self._behind_last_backward(plan, found[0], stages[0], layout)
            else:
                others = sum(each.reduce for each in found[1:])
                slowed = c * sum(each.reduce_load * each.reduce for each in found[1:])
                left = min(count, plan.pp) * sum(stage.backward for stage in stages[:-1])
                after = found[0].reduce + max(slowed, others - left)
        return before, after

    def _in_passes(self, plan: SettledPlan, stage: StageWork) -> float:
        layout = Layout.of(plan)
        found = self._buckets_of_stage(plan, stage, layout.width)
        if not plan.sharding.cuts_weights:
            return self._behind_backward(found, 0.0, stage, layout)
        again = found.gather - found.top
        before = 0.0 if plan.pp == 1 else found.ends + found.top
        forward = self._before_forward(found, stage, layout)
        if not plan.sharding.reduces_each_micro_batch:
            return forward + before + self._in_backward(found, again, stage, layout)
        return forward + before + self._behind_backward(found, again, stage, layout)

    def _before_forward(self, found: _BucketsOfStage, stage: StageWork, layout: Layout) -> float:
        c = self._cluster.device.contention * stage.computed * found.gather_load
        hidden = found.gather - found.first
        left = stage.forward - sum(
            self._cost(block, layout).forward * number for block, number in found.after
        )
        return found.ends + max(c * hidden + found.first, found.gather - left)

    def _behind_backward(
        self, found: _BucketsOfStage, gathered: float, stage: StageWork, layout: Layout
    ) -> float:
        """Return the exposed seconds of gradients while weights take `gathered` seconds of the links."""
        c = self._cluster.device.contention * stage.computed
        total = found.reduce + gathered
        between = self._backward(found.between, layout) + found.copy_last
        tail = found.last + max(0.0, found.before - between)
        slowed = c * (found.reduce_load * (found.reduce - tail) + found.gather_load * gathered)
        late = self._backward(found.lead, layout) + found.copy_first + total - stage.backward - found.copy
        return found.copy + max(slowed + tail, late)

    def _behind_last_backward(
        self, plan: SettledPlan, found: _BucketsOfStage, stage: StageWork, layout: Layout
    ) -> float:
        """Return the exposed seconds of gradients that only a step's last backward reduces."""
        if not plan.sharding.cuts_weights:
            return self._behind_backward(found, 0.0, stage, layout)
        again = found.gather - found.top
        gathered = self._in_backward(found, again, stage, layout)  # counts in every micro-batch
        return max(0.0, self._behind_backward(found, again, stage, layout) - gathered)

    def _in_backward(
        self, found: _BucketsOfStage, gathered: float, stage: StageWork, layout: Layout
    ) -> float:
        """Return the exposed seconds of weights that take `gathered` seconds in a backward without sums."""
        c = self._cluster.device.contention * stage.computed * found.gather_load
        return max(c * gathered, gathered - self._backward(found.beside, layout))

    def _backward(self, runs: Runs, layout: Layout) -> float:
        return sum(self._cost(block, layout).backward * number for block, number in runs)

    def _buckets_of_stage(self, plan: SettledPlan, stage: StageWork, width: int) -> _BucketsOfStage:
        size = 0 if plan.sharding.cuts_weights else plan.bucket
        mesh = (plan.tp, plan.cp, plan.ep, plan.dp, plan.replicate, plan.pp, plan.order)
        key = (stage.runs, mesh, plan.shard, size, width, plan.reduce)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._of_buckets(plan, stage.runs, width)
        return found

    def _of_buckets(self, plan: SettledPlan, runs: Runs, width: int) -> _BucketsOfStage:
        blocks = [block for block, number in runs for _ in range(number)]
        roots = [position for position, block in enumerate(blocks) if block in self._ends]
        filled = buckets_of(blocks, roots, plan, width)
        timed = [(each, self._of_bucket(each, width, sent_width(plan))) for each in filled]
        # The positions at which backward completes buckets.
        places = [(first, together(there)) for first, there in groupby(timed, key=lambda each: each[0].first)]
        layers = [(each, seconds) for each, seconds in timed if each.first not in roots]
        lowest = min((each.first for each, _ in layers), default=0)
        highest = max((each.last for each, _ in layers), default=0)
        lowest_last = min((each.last for each, _ in layers), default=0)
        (end, last), (before_end, before) = places[-1], places[-2] if len(places) > 1 else (0, NOTHING)
        every, of_layers = together(timed), together(layers)
        copied = (every, places[0][1], last) if plan.sharding.cuts_gradients else (NOTHING,) * 3
        return _BucketsOfStage(
            reduce=every.reduce,
            last=last.reduce,
            before=before.reduce,
            between=runs_of(blocks[end:before_end]),
            lead=runs_of(blocks[places[0][0] :]),
            gather=of_layers.gather,
            ends=every.gather - of_layers.gather,
            first=together(each for each in layers if each[0].first == lowest).gather,
            top=together(each for each in layers if each[0].last == highest).gather,
            after=runs_of(blocks[max((each.first for each, _ in layers), default=len(blocks)) :]),
            beside=runs_of(blocks[lowest_last + 1 : highest + 1]),
            reduce_load=every.reduce_loaded / every.reduce if every.reduce else 0.0,
            gather_load=of_layers.gather_loaded / of_layers.gather if of_layers.gather else 0.0,
            copy=copied[0].copy,
            copy_first=copied[1].copy,
            copy_last=copied[2].copy,
        )

    def _of_bucket(self, bucket: Bucket, width: int, sent: int) -> BucketTimes:
        key = bucket.family, bucket.parameters, bucket.number, width, sent
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = bucket_times(bucket, width, self._cluster, sent)
        return found


def runs_of(blocks: Iterable[Block]) -> Runs:
    """Return blocks in order, equal neighbours as one run."""
    return tuple((block, sum(1 for _ in alike)) for block, alike in groupby(blocks))
