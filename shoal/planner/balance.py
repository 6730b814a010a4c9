"""A fast split of equal layers, with unlike ends, into stages: the planner cuts thousands of Plans with it.

If all layers cost the same, a split is a number of layers for each rank, and in the best split the most
loaded rank has the least load. With the load M of that rank, a rank whose ends (embedding, head) cost x takes
up to floor((M - x) / c) layers of cost c, which differs between ranks if their devices do. The least M at
which these numbers reach all layers is found by going up from the mean load, over the loads x + k c that some
rank can have. If the numbers exceed the layers, the first ranks take fewer. A rank shares its layers evenly
among its stages.

`shoal.plan.stages.split_by_cost` does this for pieces that are all unlike, in up to seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache


def balanced_split(
    embedding: float,
    layer: float,
    end: float,
    layers: int,
    placement: Sequence[int],
    paces: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return the number of layers of each stage; the first also has the embedding, and the last the end.

    Args:
        embedding, layer, end: Cost of the embedding, of a layer and of the end.
        layers: Number of layers; at least the number of stages.
        placement: The rank of each stage.
        paces: By rank, how many times these costs it takes; empty if all take as long.
    """
    return _balanced(embedding, layer, end, layers, tuple(placement), tuple(paces))


@lru_cache(maxsize=1 << 14)
def _balanced(
    embedding: float,
    layer: float,
    end: float,
    layers: int,
    placement: tuple[int, ...],
    paces: tuple[float, ...],
) -> tuple[int, ...]:
    least, first, last = _inner_stages(placement)
    extras = [0.0] * len(least)
    extras[first] += embedding / layer
    extras[last] += end / layer
    counts = _counts(extras, least, layers, paces or (1.0,) * len(least))
    return _shared(counts, placement)


@lru_cache(maxsize=1 << 10)
def _inner_stages(placement: tuple[int, ...]) -> tuple[list[int], int, int]:
    """Return, by rank, its stages except the first and the last of all, and the ranks that have these two."""
    least = [0] * (max(placement) + 1)
    for rank in placement[1:-1]:
        least[rank] += 1
    return least, placement[0], placement[-1]


def _counts(
    extras: Sequence[float], least: Sequence[int], layers: int, paces: Sequence[float]
) -> tuple[int, ...]:
    """Return the layers of each rank; `extras` are in units of layers."""
    ranks = list(zip(extras, least, paces, strict=True))
    alike = Counter(ranks)  # most ranks of a long pipeline are equal
    load = (layers + sum(extras)) / sum([1 / pace for pace in paces])
    while True:
        counts = {rank: max(rank[1], math.floor(load / rank[2] - rank[0] + 1e-9)) for rank in alike}
        spare = sum([counts[rank] * number for rank, number in alike.items()]) - layers
        if spare >= 0:
            break
        load = min([(rank[0] + count + 1) * rank[2] for rank, count in counts.items()])
    found = [counts[rank] for rank in ranks]
    while spare:  # when one rank reaches a load, many may take one more layer
        for rank, low in enumerate(least):
            if spare and found[rank] > low:
                found[rank] -= 1
                spare -= 1
    return tuple(found)


@lru_cache(maxsize=1 << 14)
def _shared(counts: tuple[int, ...], placement: tuple[int, ...]) -> tuple[int, ...]:
    """Return, by stage, its share of its rank's layers; inner stages get the remainder first."""
    held: dict[int, list[int]] = {}
    for stage, rank in enumerate(placement):
        held.setdefault(rank, []).append(stage)
    split = [0] * len(placement)
    last = len(placement) - 1
    for rank, stages in held.items():
        even, more = divmod(counts[rank], len(stages))
        inner = sorted(stages, key=lambda stage: stage in (0, last))
        for position, stage in enumerate(inner):
            split[stage] = even + (position < more)
    return tuple(split)
