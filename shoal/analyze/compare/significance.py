"""Is one series of steps slower than another, beyond the noise of the machine?

The times of steps are no independent draws: a busy neighbour slows many steps in a row, and machines drift.
So single steps are not tested. Each series is cut into `BLOCKS` equal blocks of neighbouring steps, and the
median of a block is one observation: it ignores single slow steps, and blocks of many steps hardly depend on
one another. Three conditions must hold for a difference:

1. Mann and Whitney's rank test of the blocks, two-sided and exact, gives a probability below `LEVEL`, after
   Holm's correction for all values that are compared. It assumes no distribution.
2. The difference is more than `DRIFT` times what either series drifts by itself, and, as a share, what the
   whole step drifts. A drift is the larger of a trend, the median of the slopes between blocks (Theil and
   Sen) from begin to end, and of the range of the medians of four quarters. Two runs follow one another: on a
   machine that becomes slower all the time, the second run is slower whatever runs there.
3. The difference is at least `LEAST` of the value.

The size of the difference is the median of all differences between a block of one series and a block of the
other (Hodges and Lehmann); its interval is the one that belongs to the same test.

No test can tell a change of the program from a change of the machine that begins when the first run ends.
Runs side by side do not have this limit: what the machine does, it does to both. `compare_pairs` takes the
difference within each pair of steps, and cuts the differences into `PAIRED_BLOCKS` blocks. The first
condition is then Wilcoxon's signed-rank test of the blocks; the second uses the drift of the differences.

Sources: Mann and Whitney, Ann. Math. Statist. 18, 1947; Wilcoxon, Biometrics Bulletin 1, 1945; Hodges and
Lehmann, Ann. Math. Statist. 34, 1963; Sen, J. Am. Stat. Assoc. 63, 1968; Holm, Scand. J. Statist. 6, 1979.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median

BLOCKS = 12
"""Blocks of a series. More would be shorter, and depend on one another."""
FEWEST = 3 * BLOCKS
"""Steps that a series must have."""
PAIRED_BLOCKS = 24
"""Blocks of the differences within pairs, each of three pairs at least. Twelve could not reach `LEVEL`."""
LEVEL = 0.001
"""Probability of a difference where there is none, for all values that are compared together."""
DRIFT = 2.0
"""Times by which a difference must be larger than the drift of a series."""
LEAST = 0.01
"""Share of a value from which on a difference counts."""
_INTERVAL = 0.05
"""Probability that an interval does not hold the difference."""


@dataclass(frozen=True, slots=True)
class Test:
    """The comparison of two series.

    Attributes:
        before: The median block of the first series.
        after: The median block of the second.
        difference: After less before, in the unit of the values.
        low: Lower end of the interval that holds the difference with a probability of 95 %.
        high: Upper end of it.
        drift: The larger of what the two series drift by themselves, without a sign.
        probability: Probability of blocks that differ as much where nothing differs; not corrected.
        is_paired: Whether steps were compared in pairs.
    """

    before: float
    after: float
    difference: float
    low: float
    high: float
    drift: float
    probability: float
    is_paired: bool = False

    def is_beyond_drift(self, share: float) -> bool:
        """Return whether the difference is more than `DRIFT` times the drift.

        Args:
            share: The drift of the whole step, as a share.
        """
        return abs(self.difference) > DRIFT * max(self.drift, share * abs(self.before))

    def is_large(self) -> bool:
        """Return whether the difference is at least `LEAST` of the value before."""
        return abs(self.difference) >= LEAST * abs(self.before)


def compare_series(
    before: Sequence[float],
    after: Sequence[float],
    summed: Callable[[Sequence[float]], float] = median,
) -> Test:
    """Compare two series of at least `FEWEST` values each, in order of time.

    Args:
        before: The first series.
        after: The second series.
        summed: What stands for a block.
    """
    first, second = ([summed(block) for block in _cut(values, BLOCKS)] for values in (before, after))
    differences = sorted(late - early for early in first for late in second)
    aside = _outside(_orders(len(first), len(second)))
    return Test(
        before=median(first),
        after=median(second),
        difference=median(differences),
        low=differences[aside],
        high=differences[-1 - aside],
        drift=max(_drift(first), _drift(second)),
        probability=mann_whitney(first, second),
    )


def compare_pairs(
    pairs: Sequence[tuple[float, float]], summed: Callable[[Sequence[float]], float] = median
) -> Test:
    """Compare two series whose values were measured in pairs, at least three for each block.

    Args:
        pairs: The values of the first and the second series, in order of time.
        summed: What stands for a block of differences, and for all values; without a side that it prefers.
    """
    blocks = [summed(block) for block in _cut([late - early for early, late in pairs], PAIRED_BLOCKS)]
    means = sorted((one + other) / 2 for one, other in itertools.combinations_with_replacement(blocks, 2))
    aside = _outside(_signed_orders(len(blocks)))
    return Test(
        before=summed([early for early, _ in pairs]),
        after=summed([late for _, late in pairs]),
        difference=median(means),
        low=means[aside],
        high=means[-1 - aside],
        drift=_drift(blocks),
        probability=signed_rank(blocks),
        is_paired=True,
    )


def mean_of_block(values: Sequence[float]) -> float:
    """Return the mean of a block without its slowest value: one pause of the machine is no mean."""
    return fmean(sorted(values)[:-1]) if len(values) > 1 else values[0]


def mean_of_differences(values: Sequence[float]) -> float:
    """Return the mean of differences without the largest and the smallest: a pause may hit either run."""
    return fmean(sorted(values)[1:-1]) if len(values) > 2 else fmean(values)


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided probability that the ranks of two samples differ as much by chance.

    It is exact without ties; a tie counts half, and what is left over is rounded down to be cautious.
    """
    above = sum((late > early) + (late == early) / 2 for early in first for late in second)
    least = min(above, len(first) * len(second) - above)
    orders = _orders(len(first), len(second))
    # A tie in the middle would round down to a smaller count of orders, so it rounds up.
    counted = sum(orders[: int(least + 0.5) + 1])
    return min(1.0, 2 * counted / sum(orders))


def signed_rank(differences: Sequence[float]) -> float:
    """Return the two-sided probability that differences are as far to one side of zero by chance.

    It is exact without ties and zeros; a zero counts half, and what is left over is rounded to be cautious.
    """
    sizes = sorted(map(abs, differences))
    ranks = {size: (bisect_left(sizes, size) + bisect_right(sizes, size) + 1) / 2 for size in sizes}
    above = sum(
        ranks[abs(value)] * (1.0 if value > 0 else 0.5 if value == 0 else 0.0) for value in differences
    )
    least = min(above, len(sizes) * (len(sizes) + 1) / 2 - above)
    orders = _signed_orders(len(sizes))
    return min(1.0, 2 * sum(orders[: int(least + 0.5) + 1]) / sum(orders))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return probabilities corrected for their number, by Holm's method."""
    count, corrected, least = len(probabilities), [0.0] * len(probabilities), 0.0
    for place, index in enumerate(sorted(range(count), key=lambda index: probabilities[index])):
        least = max(least, min(1.0, (count - place) * probabilities[index]))
        corrected[index] = least
    return corrected


def _cut(values: Sequence[float], parts: int) -> list[Sequence[float]]:
    bounds = [len(values) * number // parts for number in range(parts + 1)]
    return [values[start:stop] for start, stop in itertools.pairwise(bounds)]


def _drift(blocks: Sequence[float]) -> float:
    """Return by how much a series changes by itself: its trend from begin to end, or between its quarters."""
    pairs = itertools.combinations(range(len(blocks)), 2)
    slopes = [(blocks[late] - blocks[early]) / (late - early) for early, late in pairs]
    quarters = [median(part) for part in _cut(blocks, 4)]
    return max(abs(median(slopes)) * len(blocks), max(quarters) - min(quarters))


@lru_cache(maxsize=64)
def _orders(first: int, second: int) -> tuple[int, ...]:
    """Return by U, the number of pairs in which the second is above the first, how many orders of two samples
    have it.
    """
    if first == 0 or second == 0:
        return (1,)
    # The largest of all values is of the first sample, or of the second and above all of the first.
    counts = [0] * (first * second + 1)
    for u, count in enumerate(_orders(first - 1, second)):
        counts[u] += count
    for u, count in enumerate(_orders(first, second - 1)):
        counts[u + first] += count
    return tuple(counts)


@lru_cache(maxsize=8)
def _signed_orders(count: int) -> tuple[int, ...]:
    """Return by W, the sum of the ranks of positive differences, how many choices of signs have it."""
    orders = [1]
    for rank in range(1, count + 1):
        longer = [*orders, *[0] * rank]
        for total, choices in enumerate(orders):
            longer[total + rank] += choices
        orders = longer
    return tuple(orders)


@lru_cache(maxsize=64)
def _outside(orders: tuple[int, ...]) -> int:
    """Return how many of the sorted differences lie outside of the interval, at each end."""
    counted = itertools.accumulate(orders)
    return next(place for place, count in enumerate(counted) if 2 * count > _INTERVAL * sum(orders))
