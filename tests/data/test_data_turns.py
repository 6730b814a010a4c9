"""Turns of sources: the formula beside a list that is written down position by position."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.stream_corpus import Turns


def naive_counts(weights: list[float], positions: int) -> list[int]:
    """How many of the first positions each source has, one source after another."""
    counts, left = [], positions
    shares = [Fraction(weight) for weight in weights]
    for place, share in enumerate(shares):
        counts.append(int(left * share / sum(shares[place:])))
        left -= counts[-1]
    return counts


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 3, 0.1, 0.7, 1e-3, 1e6]), min_size=1, max_size=5),
    st.integers(0, 2**64),
    st.integers(0, 10_000),
    st.integers(0, 3000),
)
def test_a_source_has_its_share_of_any_first_positions(
    weights: list[float], seed: int, position: int, count: int
) -> None:
    turns = Turns(seed, weights)
    before, sources = turns.before(position), turns.sources(position, count)
    assert len(sources) == count
    after = before + np.bincount(sources, minlength=len(weights))
    assert np.array_equal(after, turns.before(position + count))
    assert sum(before) == position
    assert turns.before(position // 1024 * 1024).tolist() == naive_counts(weights, position // 1024 * 1024)
    whole = np.array(naive_counts(weights, 2**40)) / 2**40
    assert np.allclose(turns.before(10 * 1024) / 10240, whole, atol=len(weights) / 10240)
    halves = turns.sources(position, 1)
    assert halves.tolist() == sources[:1].tolist() or not count
