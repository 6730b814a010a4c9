from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Loader, Prefetcher, TokenSamples


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shoal-prefetch"]


@settings(max_examples=25)
@given(count=st.integers(0, 30), depth=st.integers(1, 5))
def test_items_come_in_order_and_the_iteration_ends(count: int, depth: int) -> None:
    with Prefetcher(range(count), depth=depth) as items:
        assert list(items) == list(range(count))
        assert next(items, "end") == "end"


def test_no_more_than_depth_items_are_made_ahead() -> None:
    made = []
    fourth = threading.Event()

    def source() -> Iterator[int]:
        for item in range(10):
            made.append(item)
            if item == 3:
                fourth.set()
            yield item

    with Prefetcher(source(), depth=3) as items:
        assert next(items) == 0
        assert fourth.wait(120)  # taking one makes room for a fourth
        assert made == [0, 1, 2, 3]


def test_an_exception_reaches_the_consumer_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("broken row")

    with Prefetcher(source(), depth=5) as items:
        assert [next(items), next(items)] == [1, 2]
        for _ in range(2):  # it stays broken
            with pytest.raises(KeyError, match="broken row"):
                next(items)


def test_close_leaves_no_thread_and_may_be_called_again() -> None:
    before = prefetch_threads()
    items = Prefetcher(itertools.count())
    assert next(items) == 0
    items.close()
    items.close()
    assert prefetch_threads() == before
    assert list(items) == []


def test_leaving_the_block_by_an_exception_leaves_no_thread() -> None:
    def train() -> None:
        with Prefetcher(itertools.count()) as items:
            next(items)
            raise RuntimeError("step failed")

    before = prefetch_threads()
    with pytest.raises(RuntimeError, match="step failed"):
        train()
    assert prefetch_threads() == before


def test_what_was_only_prefetched_is_not_lost_by_a_resume() -> None:
    loader = Loader(TokenSamples(np.arange(1000, dtype=np.uint16), 9), seed=3, batch_size=4)
    uninterrupted = [inputs.tolist() for inputs, _ in itertools.islice(loader.stream(0, 0, 1, 4), 12)]
    position, seen = 0, []
    for steps in (5, 1, 6):
        with Prefetcher(loader.stream(position, 0, 1, 4), depth=3) as batches:
            for _ in range(steps):
                seen.append(next(batches)[0].tolist())
                position += 4
    assert seen == uninterrupted


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="depth"):
        Prefetcher([], depth=0)
