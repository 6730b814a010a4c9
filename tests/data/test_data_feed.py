"""Where micro-batches are made changes nothing of them, nor of what training draws."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest
import torch

from shoal.data import Loader, MapSamples, Prefetcher, open_feed
from shoal.errors import DataError
from shoal.spec.plan import Shares

PLACE = (0, 1, 2, 2)  # position, rank, ranks, micro-batch


class Noisy:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(2), random.random(), float(np.random.random()), index


def loader_of(samples):
    return Loader(samples, seed=4, batch_size=8)


def taken(feed, count):
    batches = [[each.tolist() for each in batch] for batch in islice(feed, count)]
    feed.close()
    return batches


def test_random_data_is_the_same_in_this_thread_and_in_processes_and_new_in_each_epoch():
    loader = loader_of(MapSamples(Noisy()))
    here = taken(open_feed(loader, *PLACE), 12)
    assert taken(open_feed(loader, *PLACE, workers=2), 12) == here
    drawn = {}
    for noise, _, _, indices in here:
        for row, index in zip(noise, indices, strict=True):
            drawn.setdefault(index, []).append(tuple(row))
    assert max(map(len, drawn.values())) > 1
    assert all(len(set(seen)) == len(seen) for seen in drawn.values())


def test_ranks_with_other_numbers_of_micro_batches_have_the_same_in_processes_and_here():
    loader, shares = loader_of(MapSamples(Noisy())), Shares.of([1, 3])
    for rank in range(2):
        place = (0, rank, 2, 2)
        here = taken(open_feed(loader, *place, shares=shares), 9)
        assert taken(open_feed(loader, *place, shares=shares, workers=2), 9) == here
        assert here[shares.of_rank(rank)] == taken(open_feed(loader, 8, rank, 2, 2, shares=shares), 1)[0]


def test_what_training_draws_does_not_depend_on_the_data():
    def drawn(take):
        for reseed in (random.seed, np.random.seed, torch.manual_seed):
            reseed(1)
        feed = open_feed(loader_of(MapSamples(Noisy())), *PLACE, workers=2 if take == "workers" else 0)
        values = []
        for _ in range(3):
            if take:
                next(feed)
            values.append((torch.rand(()).item(), random.random(), float(np.random.random())))
        feed.close()
        return values

    assert drawn("here") == drawn("workers") == drawn("")


def test_a_batch_holds_what_each_of_its_samples_would_draw_alone():
    loader = loader_of(MapSamples(Noisy()))
    together = loader.fetch(3, 4)
    for place in range(4):
        alone = loader.fetch(3 + place, 1)
        assert all(torch.equal(one[place], other[0]) for one, other in zip(together, alone, strict=True))


def test_data_that_says_it_draws_nothing_is_made_ahead_in_a_thread():
    loader = loader_of(MapSamples(list(range(20))))
    feed = open_feed(loader, *PLACE, ahead=3)
    assert isinstance(feed, Prefetcher)
    assert [batch.tolist() for batch in islice(feed, 5)] == [
        batch.tolist() for batch in islice(loader.stream(*PLACE), 5)
    ]
    feed.close()


def test_data_that_may_draw_is_refused_in_a_thread_beside_training():
    with (
        Prefetcher(loader_of(MapSamples(Noisy())).stream(*PLACE)) as ahead,
        pytest.raises(DataError) as caught,
    ):
        next(ahead)
    assert "open_feed" in str(caught.value)
