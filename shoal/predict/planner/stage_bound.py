"""A lower bound on the passes of a cut model under a sharding, without a Plan and its buckets.

All blocks of a stage count as one bucket, or each block as one where weights are cut.
Each stage's forward and backward take at least as long as its communication in
them. With these, the bound has the terms `begin`, `work`, `stage`, `drain` and `data` of
`shoal.predict.cost.time.step`; it leaves out messages between stages, laps, and compute that communication
slows.

A lower bound on the seconds of a pipeline's forwards and backwards, from the layers of its stages.

Rank r begins when the first micro-batch has gone through the stages before its first one, does its work for m
micro-batches, and then the last one goes back through those stages. These are the terms `begin`, `work` and
`drain` of `Costs.least_of_passes`, without the messages between stages: so it never exceeds that one, and
takes a tenth of its time.

Lower bounds on the time of gradient and weight communication, before a Plan is cut and timed.

A rank's data-parallel collectives travel one after another, at best beside its compute. Let G be the seconds
to gather the weights of some layers, R the seconds to reduce their gradients, and F and B the seconds of
their forward and backward on a rank. Then a micro-batch takes at least

    zero2        F + max(B, R)                reduced in every backward
    zero3-once   max(F, G) + max(B, G)        gathered in both; without a pipeline the last layer's weights
                                              stay from forward to backward
    zero3        max(F, G) + max(B, R + G)    gathered in both, and reduced in every backward

If layers are alike, some rank has ceil(layers / pp) of them. If they are unlike, sums over all ranks count,
with embedding and end: the sum of such maxima is at least the maximum of the sums, and some rank takes at
least the mean. Where gradients are reduced in every backward, B has their copies to buckets too. Otherwise
stages reduce them after all passes.

Where weights are gathered for every pass, each block is a bucket. Otherwise all blocks of a stage count as
one bucket: the larger a bucket is, the less time each byte takes. `shoal.predict.cost.time.data_parallel`
gives the time of each collective.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from shoal.predict.cost.time import (
    Bucket,
    Family,
    copy_seconds,
    families_over,
    gather_seconds,
    parameters_on_rank,
    reduce_seconds,
)
from shoal.predict.planner.micro_batch_time import Passes, Sums, Work
from shoal.predict.planner.space import Degrees, HybridSharding, Variant
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Groups
from shoal.spec.plan.schedules import kind_of
from shoal.spec.workload import Workload


def least_of_cut(variant: Variant, split: Sequence[int], work: Work, sums: Sums) -> float:
    """Return the bound for any sharding.

    Args:
        variant: The variant, whose pipeline has several ranks.
        split: Layers of each stage.
        work: Times of blocks.
        sums: Sums of times over layers.
    """
    pp, count, kind = variant.degrees.pp, variant.microbatches, kind_of(variant.schedule)
    starts = list(accumulate(split, initial=0))
    # The layers before rank r's first stage, which is stage r.
    own = _of_ranks(sums.whole, starts, variant)
    own[0] += work.embedding
    own[kind.placement(pp, variant.virtual)[-1]] += work.end
    if not kind.has_halves:
        return max([sums.whole[start] + count * each for start, each in zip(starts, own, strict=False)])
    chained = _of_ranks(sums.chained, starts, variant)
    through = [sums.chained[start] + count * each for start, each in zip(starts, chained, strict=False)]
    worked = [sums.forward[start] + count * each for start, each in zip(starts, own, strict=False)]
    return max(*through, *worked)


def _of_ranks(sums: Sequence[float], starts: Sequence[int], variant: Variant) -> list[float]:
    """Return the seconds of each rank's stages."""
    pp = variant.degrees.pp
    stages = [sums[stop] - sums[start] for start, stop in pairwise(starts)]
    if variant.virtual == 1:
        return stages
    if kind_of(variant.schedule).v_of == variant.virtual:
        return [first + second for first, second in zip(stages[:pp], reversed(stages[pp:]), strict=True)]
    return [sum(stages[rank::pp]) for rank in range(pp)]


Numbers = tuple[int, ...]
"""Numbers of blocks, by kind."""


class Communication(NamedTuple):
    """Seconds of the gradients' and weights' communication of a micro-batch.

    Attributes:
        forward, backward: Seconds beside forward, and beside backward.
        copies: Seconds in which gradients are copied to buckets in backward.
    """

    forward: float
    backward: float
    copies: float


class StageCommunication(NamedTuple):
    """Seconds of the gradients' and weights' communication of one stage, if nothing runs beside it.

    Attributes:
        ends: Seconds to gather the weights of embedding and end.
        gather: Seconds to gather the weights of its layers.
        least, most: Seconds to gather the weights of one of its layers.
        reduce: Seconds to reduce its gradients.
        last: Seconds to reduce the gradients that its backward completes last.
        copies: Seconds in which gradients are copied to buckets.
    """

    ends: float
    gather: float
    least: float
    most: float
    reduce: float
    last: float
    copies: float


class LeastDataParallel:
    """The bounds for a Workload on a Cluster; caches values that Plans share.

    Args:
        workload: The training.
        cluster: The machines that it runs on.
        width: Bytes of a weight in the type that computes.
    """

    def __init__(self, workload: Workload, cluster: Cluster, width: int) -> None:
        self._cluster = cluster
        self._width = width
        self._layers = workload.layers
        counts = Counter(workload.layers)
        self._is_alike = len(counts) == 1
        self._kinds = [*counts, workload.embedding, workload.end]
        self._whole = (*counts.values(), 1, 1)  # blocks of the model
        self._families, self._reduce = cache(self._families_of), cache(self._reduce_of)
        self.numbers_of = cache(self._numbers_of)

    def layers_of_rank(self, pp: int) -> int:
        """Return the number of layers of the rank that is bounded; 0 if it is the mean over all ranks."""
        return math.ceil(len(self._layers) / pp) if self._is_alike else 0

    def of_micro_batch(self, degrees: Degrees, sharding: HybridSharding) -> Communication:
        """Return a lower bound on a micro-batch's communication: of `layers_of_rank`, or of all ranks.

        Args:
            degrees: The parallel degrees.
            sharding: The sharding of the state, which communicates in each micro-batch.
        """
        kind, numbers = sharding.kind, self._whole
        if self._is_alike:
            numbers = (self.layers_of_rank(degrees.pp), 0, 0)
        copies = 0.0
        if kind.reduces_each_micro_batch and not self._cluster.parts:
            buckets = self._buckets(degrees, sharding, numbers)
            copies = sum([copy_seconds(bucket, self._width, self._cluster) for bucket in buckets])
        if not kind.cuts_weights:
            return Communication(0.0, self._reduce(degrees, sharding, numbers), copies)
        gathers, reduces = [0.0] * len(numbers), [0.0] * len(numbers)  # by kind of block
        for place, number in enumerate(numbers):
            one = self._alone(place)
            if number:
                gathers[place] = number * self._gather(degrees, sharding, one)
            if number and kind.reduces_each_micro_batch:
                reduces[place] = number * self._reduce(degrees, sharding, one)
        again = sum(gathers)
        if degrees.pp == 1:  # the weights of the last layer, of embedding and end stay
            last = self._kinds.index(self._layers[-1])
            again = sum(gathers[:-2]) - gathers[last] / numbers[last]
        return Communication(sum(gathers), again + sum(reduces), copies)

    def after_passes(self, degrees: Degrees, sharding: HybridSharding, split: tuple[int, ...]) -> float:
        """Return the least seconds in which the gradients of a stage are reduced after all passes.

        Args:
            degrees: The parallel degrees.
            sharding: The sharding of the state.
            split: Number of layers of each stage.
        """
        if degrees.pp == 1 or degrees.dp * degrees.cp == 1 or sharding.kind.reduces_each_micro_batch:
            return 0.0
        return min(
            [self._reduce(degrees, sharding, (*each[:-2], 0, 0)) for each in set(self.numbers_of(split))]
        )

    def _numbers_of(self, split: tuple[int, ...]) -> tuple[Numbers, ...]:
        """Return the numbers of blocks of each kind in each stage, with embedding and end."""
        each, first = list[list[int]](), 0
        for number in split:
            here = Counter(self._layers[first : first + number])
            each.append([*[here[kind] for kind in self._kinds[:-2]], 0, 0])
            first += number
        each[0][-2] = each[-1][-1] = 1
        return tuple(map(tuple, each))

    def of_stage(self, degrees: Degrees, sharding: HybridSharding, numbers: Numbers) -> StageCommunication:
        """Return a lower bound on a stage's communication.

        Args:
            degrees: The parallel degrees.
            sharding: The sharding of the state.
            numbers: Blocks of the stage, by kind.
        """
        kind, of_ends, of_layers = sharding.kind, list[Numbers](), list[Numbers]()
        for place in range(len(numbers)):
            if numbers[place]:
                (of_layers if place < len(numbers) - 2 else of_ends).append(self._alone(place))
        ends = gather = least = most = last = copies = 0.0
        if kind.cuts_optimizer:
            ends = sum([self._gather(degrees, sharding, each) for each in of_ends])
            gather = self._gather(degrees, sharding, (*numbers[:-2], 0, 0))
        reduce = self._reduce(degrees, sharding, numbers)
        if kind.cuts_weights:
            gathers = [self._gather(degrees, sharding, each) for each in of_layers]
            gather = sum([numbers[each.index(1)] * one for each, one in zip(of_layers, gathers, strict=True)])
            least, most = min(gathers, default=0.0), max(gathers, default=0.0)
            parts = [*of_layers, *of_ends]
            reduces = [self._reduce(degrees, sharding, each) for each in parts]
            reduce = sum([numbers[each.index(1)] * one for each, one in zip(parts, reduces, strict=True)])
            last = min(reduces[: len(of_layers)], default=0.0)
        if numbers[-2]:
            last = self._reduce(degrees, sharding, self._alone(-2))
        if kind.reduces_each_micro_batch and not self._cluster.parts:
            buckets = self._buckets(degrees, sharding, numbers)
            copies = sum([copy_seconds(bucket, self._width, self._cluster) for bucket in buckets])
        return StageCommunication(ends, gather, least, most, reduce, last, copies)

    def _alone(self, place: int) -> Numbers:
        """Return the numbers of one block of a kind."""
        numbers = [0] * len(self._kinds)
        numbers[place] = 1
        return tuple(numbers)

    def _reduce_of(self, degrees: Degrees, sharding: HybridSharding, numbers: Numbers) -> float:
        """Return the seconds of the gradients of these blocks in one bucket."""
        buckets = self._buckets(degrees, sharding, numbers)
        return sum([reduce_seconds(bucket, self._cluster) for bucket in buckets])

    def _gather(self, degrees: Degrees, sharding: HybridSharding, numbers: Numbers) -> float:
        """Return the seconds of the weights of these blocks in one bucket."""
        buckets = self._buckets(degrees, sharding, numbers)
        return sum([gather_seconds(bucket, self._width, self._cluster) for bucket in buckets])

    def _buckets(self, degrees: Degrees, sharding: HybridSharding, numbers: Numbers) -> list[Bucket]:
        """Return one bucket for each family of parameters."""
        families = self._families(degrees, sharding)
        return [Bucket(sum(map(mul, numbers, counts)), 0, 0, family) for family, counts in families]

    def _families_of(self, degrees: Degrees, sharding: HybridSharding) -> list[tuple[Family, list[int]]]:
        """Return the families of parameters, each with its parameters of each kind of block."""
        dp, tp, pp, cp, ep = degrees
        kind = sharding.kind
        shards = dp // sharding.replicate if kind.cuts_optimizer else 1
        groups = Groups.of_mesh((pp, dp // shards, shards, cp, tp), ep, is_cut=kind.cuts_optimizer)
        held = [parameters_on_rank(block.parameters, tp, ep) for block in self._kinds]
        return [(family, [family.count(each) for each in held]) for family in families_over(groups, tp, ep)]


_NOTHING = Passes(0.0, 0.0)


class Stages(NamedTuple):
    """The stages of a cut model, and their seconds for a micro-batch.

    Attributes:
        placement: The rank of each stage.
        forward, backward, back: Seconds of each stage.
        numbers: Blocks of each stage, by kind.
        has_halves: Whether `back` is only a part of `backward`.
        layer: Seconds of the quickest layer.
        front, behind: Seconds of the embedding's forward, and of the end's backward.
    """

    placement: Sequence[int]
    forward: Sequence[float]
    backward: Sequence[float]
    back: Sequence[float]
    numbers: Sequence[Numbers]
    has_halves: bool
    layer: Passes
    front: float
    behind: float


def stages_of(
    variant: Variant, split: Sequence[int], numbers: Sequence[Numbers], sums: Sums, layer: Passes
) -> Stages:
    """Return the stages of a cut model.

    Args:
        variant: The variant.
        split: Layers of each stage.
        numbers: Blocks of each stage, by kind.
        sums: Sums of times over layers.
        layer: Seconds of the quickest layer.
    """
    kind = kind_of(variant.schedule)
    starts = list(accumulate(split, initial=0))
    whole, forward, chained = (
        [each[stop] - each[start] for start, stop in pairwise(starts)]
        for each in (sums.whole, sums.forward, sums.chained)
    )
    backward = [one - other for one, other in zip(whole, forward, strict=True)]
    back = [one - other for one, other in zip(chained, forward, strict=True)]
    forward[0] += sums.embedding.forward
    backward[0] += sums.embedding.backward
    forward[-1] += sums.end.forward
    backward[-1] += sums.end.backward
    placement = kind.placement(variant.degrees.pp, variant.virtual) if variant.degrees.pp > 1 else (0,)
    return Stages(
        placement,
        forward,
        backward,
        back if kind.has_halves else backward,
        numbers,
        kind.has_halves,
        layer,
        sums.embedding.forward,
        sums.end.backward,
    )


def least_of_stages(
    stages: Stages, count: int, sharding: HybridSharding, each: Sequence[StageCommunication]
) -> float:
    """Return the least seconds until all gradients are reduced.

    Args:
        stages: The stages.
        count: Micro-batches of a step.
        sharding: The sharding.
        each: Communication of each stage.
    """
    kind = sharding.kind
    forward, backward = list(stages.forward), list(stages.backward)
    after = [0.0 if kind.reduces_each_micro_batch else beside.reduce for beside in each]
    before = [0.0] * len(each)
    if kind.gathers_each_step:
        gathered = [0.0] * (max(stages.placement) + 1)
        for stage, (rank, beside) in enumerate(zip(stages.placement, each, strict=True)):
            before[stage] = gathered[rank] + beside.ends + max(0.0, beside.gather - forward[stage])
            gathered[rank] += beside.ends + beside.gather
    last = len(each) - 1
    for stage, beside in enumerate(each):
        first = links = 0.0
        if kind.cuts_weights:  # nothing hides the gather of the first layer of a pass
            exposed = beside.least - (stages.front if stage == 0 else 0.0)
            layer = stages.layer if beside.most else _NOTHING  # a stage may have no layer
            forward[stage] = beside.ends + max(
                forward[stage] + max(0.0, exposed), beside.gather + layer.forward
            )
            links = beside.gather - beside.most
            if last:
                exposed = beside.least - (stages.behind if stage == last else 0.0)
                first = beside.ends + max(0.0, exposed)
        if kind.reduces_each_micro_batch:
            links += beside.reduce
            backward[stage] = first + max(backward[stage] + beside.copies + beside.last, links)
        elif kind.cuts_weights:
            backward[stage] = first + max(backward[stage], links + layer.backward)
    if len(each) == 1:
        left = 0.0
        if not kind.reduces_each_micro_batch:
            own, links = stages.backward[0], each[0].gather - each[0].most if kind.cuts_weights else 0.0
            left = max(0.0, max(own + each[0].last, links + after[0]) - backward[0])
        return before[0] + count * (forward[0] + backward[0]) + left
    back = stages.back if stages.has_halves else backward
    return _end(stages.placement, count, forward, backward, back, before, after)


def _end(
    placement: Sequence[int],
    count: int,
    forward: Sequence[float],
    backward: Sequence[float],
    back: Sequence[float],
    before: Sequence[float],
    after: Sequence[float],
) -> float:
    """Return the largest of the terms; `after` are the seconds after a stage's last backward."""
    ranks = max(placement) + 1
    works, chained, posts = [0.0] * ranks, [0.0] * ranks, [math.inf] * ranks
    begins, drains = [0.0] * ranks, [0.0] * ranks  # of each rank's first stage
    begin = drain = through = 0.0
    for stage, rank in enumerate(placement):
        if before[stage] > begin:
            begin = before[stage]
        if posts[rank] == math.inf:
            begins[rank], drains[rank] = begin, drain
        own = forward[stage] + back[stage]
        works[rank] += forward[stage] + backward[stage]
        chained[rank] += own
        if after[stage] < posts[rank]:
            posts[rank] = after[stage]
        passed = begin + count * own + drain
        if passed > through:
            through = passed
        begin += forward[stage]
        drain += back[stage]
    last = backward[0] - back[0] + posts[placement[0]]
    return max(
        through + last,
        *[begin + post + count * work for begin, post, work in zip(begins, posts, works, strict=True)],
        *[
            begin + count * work + drain + last
            for begin, work, drain in zip(begins, chained, drains, strict=True)
        ],
    )
