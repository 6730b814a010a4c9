"""Seconds of gradients and weights that data-parallel ranks exchange and no compute hides, in closed form.

Buckets (`buckets.py`) travel one after another, each as soon as it can: gradients once backward has made
them, weights so that forward finds them. Of one stage and micro-batch, with F and B its forward and backward:

    reduce    R seconds in all. Backward needs `lead` to complete the first bucket, and what is complete only
              when it ends, `tail`, is never hidden: max(c (R - tail) + tail, lead + R - B)
    gather    G seconds besides those of embedding and end, which forward waits for at once. Its first bucket
              is never hidden, and behind the last one come `after` seconds:
              ends + max(c (G - first) + first, G - (F - after))

with c the device's `contention`, by which what travels slows compute, times the share that compute has of
F + B. With m micro-batches:

    none, zero1   reduce once: without a pipeline beside the last backward. With one a stage begins when its
                  last backward is over: the first stage's is exposed, the rank's v - 1 others travel beside
                  the min(m, p) (v - 1) / v backwards that are left
    zero1, zero2  gather once, when the step begins
    zero2         reduce in every backward
    zero3         gather in every forward and backward, and reduce in every backward; without a pipeline the
                  embedding, the end and the last layer stay from forward to backward

Of ranks of a pipeline those behind wait for the first forwards, and end before the first rank does unless the
schedule fills that time: what they exchange once has so much longer. What is exposed in every micro-batch is
also exposed in the (p - 1) / v that fill the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.block import BlockCost
from shoal.cost.buckets import Bucket, buckets_of
from shoal.cost.layout import Layout
from shoal.cost.network import collective_seconds
from shoal.plan import Plan
from shoal.workload import Block, Workload

__all__ = ["Exchanges", "Runs", "StageWork", "gather_seconds", "reduce_seconds", "runs_of"]

_SUM_WIDTH = 4.0  # bytes of an element of a sum of gradients: fp32

Runs = tuple[tuple[Block, int], ...]
"""Blocks, and how many of each."""


class StageWork(NamedTuple):
    """One stage's blocks, and seconds for one micro-batch.

    Attributes:
        blocks: In order.
        forward: With what is waited for within blocks.
        backward: The same.
        computed: Share of these seconds in which the device computes.
    """

    blocks: tuple[Block, ...]
    forward: float
    backward: float
    computed: float


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """Seconds of one stage's buckets by themselves, and the blocks whose compute lies between.

    Attributes:
        reduce: Of all gradients.
        last: Of those that are complete when backward ends.
        before: Of those that are complete at the place before that.
        between: What backward computes between these two.
        lead: What backward computes before the first bucket is complete.
        gather: Of all weights but those of embedding and end.
        ends: Of these.
        first: Of what the first layer needs.
        top: Of what the last layer needs.
        after: What forward computes once the last bucket is there.
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


class Exchanges:
    """What stages of a Workload exchange on a Cluster; remembers what Plans share.

    Args:
        workload: What is trained.
        cluster: Where.
        cost: What a block takes under a layout.
    """

    def __init__(
        self, workload: Workload, cluster: Cluster, cost: Callable[[Block, Layout], BlockCost]
    ) -> None:
        self._cluster = cluster
        self._cost = cost
        self._ends = {id(workload.embedding), id(workload.end)}
        self._known: dict[tuple[object, ...], _Exchanged] = {}
        self._seconds: dict[tuple[object, ...], tuple[float, float]] = {}

    def in_micro_batch(self, plan: Plan, stages: Sequence[StageWork]) -> float:
        """Exposed seconds of every micro-batch of a rank with these stages."""
        if plan.shard not in ("zero2", "zero3") or plan.ranks == plan.pp:
            return 0.0
        numbers = Counter(id(stage.blocks) for stage in stages)
        unlike = {id(stage.blocks): stage for stage in stages}
        return sum(number * self._in_passes(plan, unlike[name]) for name, number in numbers.items())

    def in_step(self, plan: Plan, stages: Sequence[StageWork], count: int) -> tuple[float, float]:
        """Exposed seconds of every step of a rank with these stages: before, and after all its compute.

        Args:
            plan: How.
            stages: Of the rank, in order.
            count: Micro-batches of a step.
        """
        if plan.ranks == plan.pp:
            return 0.0, 0.0
        c = self._cluster.device.contention
        layout = Layout.of(plan)
        found = [self._exchanged(plan, stage, layout.width) for stage in stages]
        before = after = 0.0
        if plan.shard in ("zero1", "zero2"):
            before = self._before_forward(found[0], stages[0], layout)
            before += c * sum(each.gather + each.ends for each in found[1:])
        if plan.shard in ("none", "zero1"):
            if plan.pp == 1:
                after = self._behind_backward(found[0], 0.0, stages[0], layout)
            else:
                others = sum(each.reduce for each in found[1:])
                left = min(count, plan.pp) * sum(stage.backward for stage in stages[:-1])
                after = found[0].reduce + max(c * others, others - left)
        return before, after

    def _in_passes(self, plan: Plan, stage: StageWork) -> float:
        layout = Layout.of(plan)
        found = self._exchanged(plan, stage, layout.width)
        if plan.shard == "zero2":
            return self._behind_backward(found, 0.0, stage, layout)
        again = found.gather - found.top
        before = 0.0 if plan.pp == 1 else found.ends + found.top
        forward = self._before_forward(found, stage, layout)
        return forward + before + self._behind_backward(found, again, stage, layout)

    def _before_forward(self, found: _Exchanged, stage: StageWork, layout: Layout) -> float:
        c = self._cluster.device.contention * stage.computed
        hidden = found.gather - found.first
        left = stage.forward - sum(
            self._cost(block, layout).forward * number for block, number in found.after
        )
        return found.ends + max(c * hidden + found.first, found.gather - left)

    def _behind_backward(self, found: _Exchanged, gathered: float, stage: StageWork, layout: Layout) -> float:
        """Of gradients, with `gathered` seconds of weights on the way besides."""
        c = self._cluster.device.contention * stage.computed
        total = found.reduce + gathered
        tail = found.last + max(0.0, found.before - self._backward(found.between, layout))
        late = self._backward(found.lead, layout) + total - stage.backward
        return max(c * (total - tail) + tail, late)

    def _backward(self, runs: Runs, layout: Layout) -> float:
        return sum(self._cost(block, layout).backward * number for block, number in runs)

    def _exchanged(self, plan: Plan, stage: StageWork, width: int) -> _Exchanged:
        size = 0 if plan.shard == "zero3" else plan.bucket
        mesh = (plan.tp, plan.cp, plan.ep, plan.dp, plan.replicate)
        key = (id(stage.blocks), mesh, plan.shard, size, width)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._of_buckets(plan, stage.blocks, width)
        return found

    def _of_buckets(self, plan: Plan, blocks: Sequence[Block], width: int) -> _Exchanged:
        roots = [position for position, block in enumerate(blocks) if id(block) in self._ends]
        timed = [(each, *self._of_bucket(each, width)) for each in buckets_of(blocks, roots, plan, width)]
        places: list[tuple[int, float]] = []  # where backward completes buckets, and their seconds
        for first, there in groupby(timed, key=lambda each: each[0].first):
            places.append((first, sum(seconds for _, seconds, _ in there)))
        gathers = [(each, seconds) for each, _, seconds in timed]
        layers = [(each, seconds) for each, seconds in gathers if each.first not in roots]
        lowest = min((each.first for each, _ in layers), default=0)
        highest = max((each.last for each, _ in layers), default=0)
        (end, last), (before_end, before) = places[-1], places[-2] if len(places) > 1 else (0, 0.0)
        return _Exchanged(
            reduce=sum(seconds for _, seconds in places),
            last=last,
            before=before,
            between=runs_of(blocks[end:before_end]),
            lead=runs_of(blocks[places[0][0] :]),
            gather=sum(seconds for _, seconds in layers),
            ends=sum(seconds for each, seconds in gathers if each.first in roots),
            first=sum(seconds for each, seconds in layers if each.first == lowest),
            top=sum(seconds for each, seconds in layers if each.last == highest),
            after=runs_of(blocks[max((each.first for each, _ in layers), default=len(blocks)) :]),
        )

    def _of_bucket(self, bucket: Bucket, width: int) -> tuple[float, float]:
        """Seconds of its gradients, and of its weights."""
        key = bucket.family, bucket.parameters, bucket.number, width
        found = self._seconds.get(key)
        if found is None:
            found = reduce_seconds(bucket, self._cluster), gather_seconds(bucket, width, self._cluster)
            self._seconds[key] = found
        return found


def reduce_seconds(bucket: Bucket, cluster: Cluster) -> float:
    """Of its gradients, over the shards and then over the replicas; of all equal buckets together."""
    family, nbytes = bucket.family, _SUM_WIDTH * bucket.parameters
    scatter = collective_seconds("reduce_scatter", nbytes, family.shards, cluster)
    owned = nbytes / family.shards.size
    return bucket.number * (scatter + collective_seconds("all_reduce", owned, family.replicas, cluster))


def gather_seconds(bucket: Bucket, width: int, cluster: Cluster) -> float:
    """Of its weights of so many bytes each, over the shards; of all equal buckets together."""
    nbytes = width * bucket.parameters
    return bucket.number * collective_seconds("all_gather", nbytes, bucket.family.shards, cluster)


def runs_of(blocks: Iterable[Block]) -> Runs:
    """Unlike blocks, and how many there are of each."""
    counted: dict[int, tuple[Block, int]] = {}
    for block in blocks:
        counted[id(block)] = block, counted.get(id(block), (block, 0))[1] + 1
    return tuple(counted.values())
