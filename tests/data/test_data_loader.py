from __future__ import annotations

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.data import Loader, order
from shoal.errors import ConfigError, DataError, PlanError
from shoal.spec.plan import Shares


class IndexSamples:
    """Samples that are their own indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices


def deal(
    loader: Loader, position: int, ranks: int, microbatch: int, shares: Shares | None = None
) -> NDArray[np.int64]:
    """One batch as all ranks together take it, micro-batch after micro-batch, rank after rank."""
    parts = [list(loader.microbatches(position, rank, ranks, microbatch, shares)) for rank in range(ranks)]
    return np.concatenate([part for step in zip_longest(*parts) for part in step if part is not None])


@given(
    count=st.integers(1, 60), seed=st.integers(0, 9), position=st.integers(0, 500), length=st.integers(0, 200)
)
def test_indices_are_the_orders_of_the_epochs_one_after_another(
    count: int, seed: int, position: int, length: int
) -> None:
    loader = Loader(IndexSamples(count), seed=seed, batch_size=1)
    expected = [
        int(order(seed, p // count, count, np.array([p % count]))[0])
        for p in range(position, position + length)
    ]
    assert loader.indices(position, length).tolist() == expected


@given(
    count=st.integers(1, 100),
    position=st.integers(0, 1000),
    ranks=st.integers(1, 6),
    microbatch=st.integers(1, 5),
    accumulation=st.integers(1, 4),
)
def test_a_batch_is_the_same_whatever_the_ranks_and_the_micro_batch(
    count: int, position: int, ranks: int, microbatch: int, accumulation: int
) -> None:
    batch_size = ranks * microbatch * accumulation
    loader = Loader(IndexSamples(count), seed=7, batch_size=batch_size)
    dealt = deal(loader, position, ranks, microbatch)
    assert np.array_equal(dealt, loader.indices(position, batch_size))


@settings(max_examples=50)
@given(
    count=st.integers(1, 80),
    seed=st.integers(0, 2**64 - 1),
    layouts=st.lists(
        st.sampled_from(
            [
                (1, 12),
                (2, 3),
                (3, 4),
                (4, 1),
                (6, 2),
                (12, 1),
                (2, 1, "7-5"),
                (3, 2, "1-4-1"),
                (6, 1, "3-1x3-3x2"),
            ]
        ),
        min_size=10,
        max_size=20,
    ),
)
def test_a_sample_is_seen_once_an_epoch_also_when_each_batch_resumes_on_other_ranks(
    count: int, seed: int, layouts: list[tuple[int, int] | tuple[int, int, str]]
) -> None:
    seen: list[int] = []
    for ranks, microbatch, *shares in layouts:
        loader = Loader(IndexSamples(count), seed=seed, batch_size=12)  # a new process each time
        dealt = deal(loader, len(seen), ranks, microbatch, *map(Shares.parse, shares))
        assert dealt.tolist() == loader.indices(len(seen), 12).tolist()
        seen.extend(dealt.tolist())
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


@given(
    count=st.integers(1, 50),
    stops=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    epochs=st.integers(1, 3),
)
def test_a_sample_is_seen_once_an_epoch_whatever_position_the_run_stopped_at(
    count: int, stops: list[int], epochs: int
) -> None:
    loader = Loader(IndexSamples(count), seed=1, batch_size=1)
    seen: list[int] = []
    for length in [*stops, *[count] * epochs]:
        seen.extend(loader.indices(len(seen), length).tolist())
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_a_stream_runs_on_across_batches() -> None:
    loader = Loader(IndexSamples(10), seed=0, batch_size=4)
    stream = loader.stream(8, 1, 2, 1)
    streamed = [next(stream) for _ in range(6)]
    by_batch = [part for start in (8, 12, 16) for part in loader.microbatches(start, 1, 2, 1)]
    assert np.array_equal(streamed, by_batch)


def test_a_batch_size_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    loader = Loader(IndexSamples(100), seed=0, batch_size=50)
    with pytest.raises(PlanError) as caught:
        loader.microbatches(0, 0, 4, 8)
    assert "50" in caught.value.given
    assert "32" in caught.value.possible
    assert "32 or 64" in caught.value.change


def test_a_batch_size_that_is_too_small_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(PlanError, match="set the batch size to 32,"):
        Loader(IndexSamples(100), seed=0, batch_size=8).accumulation(4, 8)


@pytest.mark.parametrize(("ranks", "microbatch"), [(0, 1), (1, 0), (-2, 4)])
def test_ranks_and_micro_batches_must_be_positive(ranks: int, microbatch: int) -> None:
    with pytest.raises(PlanError):
        Loader(IndexSamples(10), seed=0, batch_size=8).accumulation(ranks, microbatch)


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        Loader(IndexSamples(10), seed=0, batch_size=8).microbatches(0, 2, 2, 1)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Loader(IndexSamples(10), seed=0, batch_size=8).indices(-1, 4)


def test_a_loader_needs_samples_and_a_batch_size() -> None:
    with pytest.raises(DataError):
        Loader(IndexSamples(0), seed=0, batch_size=1)
    with pytest.raises(ConfigError):
        Loader(IndexSamples(5), seed=0, batch_size=0)
