"""A lower bound on the passes of a cut model under a sharding, without a Plan and its buckets.

All blocks of a stage count as one bucket, or each block as one where weights are cut
(`data_parallel_bound.py`). Each stage's forward and backward take at least as long as its communication in
them. With these, the bound has the terms `begin`, `work`, `stage`, `drain` and `data` of
`shoal.cost.time.step`; it leaves out messages between stages, laps, and compute that communication slows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from shoal.plan.schedules import kind_of
from shoal.planner.data_parallel_bound import Numbers, StageCommunication
from shoal.planner.space import HybridSharding, Variant
from shoal.planner.work import Passes, Sums

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
