"""Chooses some of many Plans to compare, where all would take too long."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from shoal.errors import ConfigError
from shoal.plan import DEGREES, Plan

Pair = tuple[Hashable, Hashable]

_CHOICES = ("replicate", "shard", "tensor", "context", "schedule", "recompute")


def with_axes(plans: Sequence[Plan], least: int) -> list[Plan]:
    """Return the Plans in which at least `least` of the degrees are larger than 1.

    `ep` counts as a degree, although its ranks are those of dp and cp.

    Raises:
        ConfigError: No Plan has so many.
    """
    counts = [sum(getattr(plan, degree) > 1 for degree in DEGREES) for plan in plans]
    most = max(counts, default=0)
    if most < least:
        raise ConfigError(
            f"axes={least} was given, and no Plan has more than {most} degrees above 1",
            possible=f"up to {most} for this model and so many ranks",
            change=f"give --axes {most} or less, or more --ranks",
        )
    return [plan for plan, count in zip(plans, counts, strict=True) if count >= least]


def covering(plans: Sequence[Plan], count: int) -> list[Plan]:
    """Return a sample of the Plans that covers as many pairs of settings as possible.

    All degrees together are one setting; each choice is another. So a large enough sample has every
    combination of degrees with every sharding, with every kind of tensor and context parallelism, and so on,
    and every pair of these choices. The algorithm is greedy: the next Plan is always the first of those with
    the most new pairs; once no pair is new, all pairs count as new again. The same Plans give the same
    sample. (All-pairs testing: Cohen et al. 1997, doi:10.1109/32.605761.)

    Args:
        plans: The Plans to choose from.
        count: The number of Plans wanted.

    Returns:
        At most `count` Plans, in the order of `plans`.

    Raises:
        ConfigError: `count` is not positive.
    """
    if count < 1:
        raise ConfigError(
            f"sample={count} was given",
            possible="1 or more",
            change="give a larger --sample, or leave it out",
        )
    left = {index: _pairs(plan) for index, plan in enumerate(plans)}
    chosen: list[int] = []
    seen: set[Pair] = set()
    while left and len(chosen) < count:
        index = max(left, key=lambda each: len(left[each] - seen))
        if left[index] <= seen and seen:
            seen = set()
            continue
        seen |= left.pop(index)
        chosen.append(index)
    return [plans[index] for index in sorted(chosen)]


def _pairs(plan: Plan) -> set[Pair]:
    settings: list[Hashable] = [tuple(getattr(plan, degree) for degree in DEGREES)]
    settings += [(name, getattr(plan, name)) for name in _CHOICES]
    return set(itertools.combinations(settings, 2))
