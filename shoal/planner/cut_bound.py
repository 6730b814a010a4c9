"""A lower bound on the seconds of a pipeline's forwards and backwards, from the layers of its stages.

Rank r begins when the first micro-batch has gone through the stages before its first one, does its work for m
micro-batches, and then the last one goes back through those stages. These are the terms `begin`, `work` and
`drain` of `Costs.least_of_passes`, without the messages between stages: so it never exceeds that one, and
takes a tenth of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from shoal.plan.schedules import kind_of
from shoal.planner.space import Variant
from shoal.planner.work import Sums, Work


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
