from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import order

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def naive_order(seed: int, epoch: int, count: int, position: int) -> int:
    """The same network for one position, in Python's unbounded integers."""
    base = mix(((mix((seed + GOLDEN) & MASK) ^ (epoch & MASK)) + GOLDEN) & MASK)
    keys = [mix((base + step * GOLDEN) & MASK) for step in range(1, 13)]
    bits = (count - 1).bit_length()
    low_width, high_width = bits // 2, bits - bits // 2
    while True:
        high, low = divmod(position, 1 << low_width)
        for step, key in enumerate(keys):
            if step % 2 == 0:
                high ^= mix(low ^ key) % (1 << high_width)
            else:
                low ^= mix(high ^ key) % (1 << low_width)
        position = (high << low_width) | low
        if position < count:
            return position


integers = st.integers(-(2**63), 2**64 - 1)


@given(seed=integers, epoch=st.integers(0, 2**40), count=st.integers(1, 3000))
def test_every_epoch_is_a_permutation(seed: int, epoch: int, count: int) -> None:
    permuted = order(seed, epoch, count, np.arange(count))
    assert np.array_equal(np.sort(permuted), np.arange(count))


@given(
    seed=integers,
    epoch=st.integers(0, 2**40),
    count=st.integers(1, 2**62),
    fractions=st.lists(st.floats(0, 1, exclude_max=True), max_size=5),
)
def test_the_order_is_that_of_the_naive_network(
    seed: int, epoch: int, count: int, fractions: list[float]
) -> None:
    positions = [min(count - 1, int(fraction * count)) for fraction in fractions]
    expected = [naive_order(seed, epoch, count, position) for position in positions]
    assert order(seed, epoch, count, np.array(positions, dtype=np.int64)).tolist() == expected


def test_positions_may_be_asked_for_in_any_pieces() -> None:
    whole = order(3, 1, 1000, np.arange(1000))
    shuffled = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(order(3, 1, 1000, shuffled), whole[shuffled])


def test_a_huge_count_gives_distinct_indices_in_range() -> None:
    count = 2**40 - 87
    permuted = order(1, 2, count, np.arange(count - 50_000, count))
    assert permuted.dtype == np.int64
    assert 0 <= permuted.min() <= permuted.max() < count
    assert len(np.unique(permuted)) == 50_000


def test_epochs_and_seeds_give_unrelated_orders() -> None:
    count = 10_000
    orders = [order(seed, epoch, count, np.arange(count)) for seed in range(4) for epoch in range(4)]
    for index, first in enumerate(orders):
        for second in orders[:index]:
            # Two random permutations agree in one place on average; 12 has a chance of about 1e-9.
            assert np.count_nonzero(first == second) < 12


def test_every_sample_is_equally_likely_at_every_position() -> None:
    count, trials = 7, 2000
    table = np.zeros((count, count))
    for seed in range(trials):
        table[np.arange(count), order(seed, 0, count, np.arange(count))] += 1
    statistic = ((table - trials / count) ** 2 / (trials / count)).sum()
    # For random permutations, count / (count - 1) times a chi-square with (count - 1)**2 degrees of freedom.
    freedom = (count - 1) ** 2
    assert statistic < count / (count - 1) * (freedom + 6 * math.sqrt(2 * freedom))


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_permutation_of_few_samples_is_equally_likely(count: int) -> None:
    trials = 3000
    tally = Counter(tuple(order(0, epoch, count, np.arange(count))) for epoch in range(trials))
    kinds = math.factorial(count)
    statistic = sum((seen - trials / kinds) ** 2 for seen in tally.values()) / (trials / kinds)
    assert len(tally) == kinds
    assert statistic < (kinds - 1) + 6 * math.sqrt(2 * (kinds - 1))  # six deviations of a chi-square


@pytest.mark.parametrize("count", [4096, 4097, 100_000])
def test_samples_land_far_from_where_they_were_and_from_their_neighbours(count: int) -> None:
    permuted = order(5, 0, count, np.arange(count))
    deviations = 6 / math.sqrt(count)
    # The distance of two uniform points of [0, 1] has mean 1/3 and variance 1/18.
    displacement = np.abs(permuted - np.arange(count)).mean() / count
    assert abs(displacement - 1 / 3) < deviations * math.sqrt(1 / 18)
    assert abs(np.corrcoef(permuted[:-1], permuted[1:])[0, 1]) < deviations


@pytest.mark.parametrize(("count", "position"), [(0, 0), (-1, 0), (2**62 + 1, 0), (5, 5), (5, -1)])
def test_a_count_or_position_out_of_range_is_refused(count: int, position: int) -> None:
    with pytest.raises(ValueError, match="must"):
        order(0, 0, count, np.array([position]))
