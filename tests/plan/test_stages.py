"""Splits into stages, against all splits of small models."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.spec.plan.stage_search import Amounts, Load, moves, partition
from shoal.spec.plan.stages import Cost, parse_split, ranges_of, split_by_cost, split_by_count

WORK = st.lists(st.integers(0, 9), min_size=3, max_size=9)


def every_split(pieces, stages):
    for cuts in itertools.combinations(range(1, pieces), stages - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, pieces)))


def sums(values, split, placement):
    """Of each rank, and of each stage."""
    stages = [sum(values[piece] for piece in pieces) for pieces in ranges_of(split)]
    ranks = dict.fromkeys(placement, 0)
    for rank, value in zip(placement, stages, strict=True):
        ranks[rank] += value
    return list(ranks.values()), stages


def costs_of(work, memory=None):
    # twice as much backward as forward, in exact thirds
    return [Cost(each, 2 * each, held) for each, held in zip(work, memory or [0] * len(work), strict=True)]


def looped(ranks, virtual):
    return tuple(stage % ranks for stage in range(ranks * virtual))


def v_shaped(ranks):
    return (*range(ranks), *reversed(range(ranks)))


@given(work=WORK, stages=st.integers(1, 7))
def test_one_stage_a_rank_is_split_as_well_as_can_be(work, stages):
    stages = min(stages, len(work) - 2)
    split = split_by_cost(costs_of(work), stages)
    assert len(split) == stages
    assert min(split) >= 1
    assert sum(split) == len(work)

    def quality(split):
        each = sums(work, split, range(stages))[1]
        return max(each), sum(time * time for time in each)

    assert quality(split) == min(map(quality, every_split(len(work), stages)))


@given(
    work=st.lists(st.integers(0, 9), min_size=8, max_size=11),
    placement=st.sampled_from([looped(2, 2), looped(3, 2), looped(2, 3), v_shaped(2), v_shaped(3)]),
    microbatches=st.sampled_from([1, 4, 1000]),
)
@settings(max_examples=60)
def test_several_stages_a_rank_are_split_as_well_as_can_be(work, placement, microbatches):
    ranks = len(set(placement))
    split = split_by_cost(costs_of(work), len(placement), placement, microbatches=microbatches)

    def quality(split):  # in whole numbers, so that sums are exact
        by_rank, by_stage = sums(work, split, placement)
        return max(by_rank) * microbatches + max(by_stage) * (ranks - 1)

    assert quality(split) == min(map(quality, every_split(len(work), len(placement))))


@given(
    pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=6, max_size=9),
    placement=st.sampled_from([(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)]),
    limit=st.integers(5, 40),
)
@example(  # more even would be 2-3-1-1, of which the second stage does not fit
    pieces=[(6, 6), (2, 1), (2, 9), (5, 8), (1, 3), (9, 9), (9, 1)], placement=(0, 1, 2, 3), limit=17
)
@settings(max_examples=60)
def test_a_limit_of_memory_is_kept_at_the_least_cost_of_time(pieces, placement, limit):
    work, memory = zip(*pieces, strict=True)
    fitting = [
        max(sums(work, split, placement)[0])
        for split in every_split(len(work), len(placement))
        if max(sums(memory, split, placement)[0]) <= limit
    ]
    costs = costs_of(work, memory)
    if not fitting:
        with pytest.raises(PlanError, match="keeps every rank within"):
            split_by_cost(costs, len(placement), placement, limit)
        return
    # so many micro-batches that the largest stage tells equal splits apart at most
    split = split_by_cost(costs, len(placement), placement, limit, microbatches=10**6)
    assert max(sums(memory, split, placement)[0]) <= limit
    assert max(sums(work, split, placement)[0]) == min(fitting)


@given(
    pieces=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=6, max_size=8),
    placement=st.sampled_from([(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)]),
    data=st.data(),
)
@settings(max_examples=60)
def test_activations_count_as_often_as_the_stage_holds_them(pieces, placement, data):
    work, states, kept = zip(*pieces, strict=True)
    stages = len(placement)
    held = data.draw(st.lists(st.integers(0, 4), min_size=stages, max_size=stages))
    limit = data.draw(st.integers(5, 120))

    def most(split):
        total = dict.fromkeys(placement, 0)
        for stage, owned in enumerate(ranges_of(split)):
            total[placement[stage]] += sum(states[piece] + held[stage] * kept[piece] for piece in owned)
        return max(total.values())

    splits = list(every_split(len(work), stages))
    fitting = [max(sums(work, split, placement)[0]) for split in splits if most(split) <= limit]
    costs = [Cost(each, 2 * each, *bytes) for each, *bytes in pieces]
    if not fitting:
        with pytest.raises(PlanError, match="keeps every rank within") as caught:
            split_by_cost(costs, stages, placement, limit, held=held)
        assert caught.value.possible.startswith(f"a limit of {min(map(most, splits))}B or more")
        return
    split = split_by_cost(costs, stages, placement, limit, microbatches=10**6, held=held)
    assert most(split) <= limit
    assert max(sums(work, split, placement)[0]) == min(fitting)


def test_a_piece_that_an_earlier_stage_cannot_hold_may_be_in_a_later_one():
    costs = [Cost(0, 0, 0, kept) for kept in (0, 0, 0, 0, 6, 0)]
    split = split_by_cost(costs, 3, (0, 1, 2), 5, held=[0, 1, 0])
    assert 4 not in ranges_of(split)[1]


def test_a_limit_that_cannot_be_kept_is_refused_with_one_that_can():
    costs = costs_of([1, 1, 1, 1], [1024, 1024, 2048, 1024])
    with pytest.raises(PlanError) as caught:
        split_by_cost(costs, 2, limit=2000)
    assert caught.value.possible.startswith("a limit of 3KiB or more")
    assert split_by_cost(costs, 2, limit=3 * 1024) == (2, 2)


@pytest.mark.parametrize("placement", [looped(8, 4), v_shaped(16), looped(4, 8)])
def test_a_large_model_is_split_close_to_evenly(placement):
    # A perfect share is a lower bound. Blocks of 1 beside an end of 4.5 cannot always meet it.
    work = [0.1, *[1.0] * 124, 4.5]
    split = split_by_cost(costs_of(work), len(placement), placement)
    share = sum(work) / len(set(placement))
    assert max(sums(work, split, placement)[0]) < share + 1


def test_the_end_weighs_what_it_weighs():
    # with a large vocabulary the head is worth three blocks, and the last stage has three blocks fewer
    work = [0, *[1] * 13, 3]
    split = split_by_cost(costs_of(work), 4)
    assert split == (5, 4, 4, 2)
    assert max(sums(work, split, range(4))[1]) == 4
    assert max(sums(work, split_by_count(13, 4), range(4))[1]) == 6


@given(
    pieces=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=8, max_size=14),
    placement=st.sampled_from([(0, 1, 2), looped(2, 2), looped(3, 2), v_shaped(3)]),
    data=st.data(),
)
@settings(max_examples=60)
def test_moves_are_scored_as_the_splits_that_they_make(pieces, placement, data):
    work, states, kept = zip(*pieces, strict=True)
    stages = len(placement)
    held = data.draw(st.lists(st.integers(0, 4), min_size=stages, max_size=stages))
    load = Load(Amounts(work), Amounts(states, kept, held), placement, 40, 0.5)
    cuts = data.draw(st.permutations(range(1, len(work))))[: stages - 1]
    split = [stop - start for start, stop in itertools.pairwise([0, *sorted(cuts), len(work)])]
    for score, giver, taker in moves(load, split, range(stages)):
        moved = list(split)
        moved[giver] -= 1
        moved[taker] += 1
        assert score == load.score(moved)  # sums of whole numbers are exact


@pytest.mark.parametrize("placement", [tuple(range(128)), v_shaped(64), looped(32, 4)])
def test_a_very_large_model_is_split_within_a_piece_of_an_even_share(placement):
    work = [0.1, *(1 + (7 * piece % 10) / 10 for piece in range(1000)), 4.5]
    split = split_by_cost(costs_of(work), 128, placement, microbatches=512)
    share = sum(work) / len(set(placement))
    assert max(sums(work, split, placement)[0]) < share + max(work[1:-1])


@given(layers=st.integers(1, 40), stages=st.integers(1, 40))
def test_split_by_count_differs_by_one_block_at_most(layers, stages):
    stages = min(stages, layers)
    split = list(split_by_count(layers, stages))
    split[0] -= 1
    split[-1] -= 1
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
    assert parse_split("-".join(map(str, split)), layers) == split_by_count(layers, stages)


def test_a_split_made_by_hand_counts_blocks():
    assert parse_split("6-7-7-4", 24) == (7, 7, 7, 5)
    assert parse_split("0-8-8-0", 16) == (1, 8, 8, 1)
    assert parse_split("3", 3) == (5,)
    assert ranges_of((2, 1, 3)) == (range(2), range(2, 3), range(3, 6))


@pytest.mark.parametrize(
    ("text", "message", "even"),
    [
        ("6-x", "cannot be read", "12-12"),
        ("", "cannot be read", "24"),
        ("6-7", "has 13 blocks, and the model has 24", "12-12"),
        ("12-0-12", "without any block", "8-8-8"),
        ("6-6-6-x", "cannot be read", "6-6-6-6"),
    ],
)
def test_a_split_made_by_hand_that_is_wrong_is_refused(text, message, even):
    with pytest.raises(PlanError, match=message) as caught:
        parse_split(text, 24)
    assert f"write, for example, {even}" in caught.value.change


@pytest.mark.parametrize("split", [lambda: split_by_count(3, 4), lambda: split_by_cost(costs_of([1] * 5), 4)])
def test_more_stages_than_blocks_are_refused_with_what_is_possible(split):
    with pytest.raises(PlanError, match="cannot be cut into 4 stages") as caught:
        split()
    assert caught.value.possible.startswith("1 to 3 stages")


def test_what_is_no_cost_and_no_placement_is_refused():
    with pytest.raises(PlanError, match="the cost of a piece is"):
        split_by_cost([Cost(1, 1), Cost(float("nan"), 1), Cost(1, 1)], 1)
    with pytest.raises(PlanError, match="is for 3 stages, and there are 2"):
        split_by_cost(costs_of([1] * 6), 2, (0, 1, 0))


def test_a_stage_leaves_a_piece_to_one_that_holds_it_less_often():
    """The first stage could take five pieces, and the second could then take none of those that are left."""
    pieces = Amounts([0] * 6, kept=[0, 0, 0, 1, 2, 4], held=[0, 4, 1])
    split = partition(pieces, pieces, 3, 6)
    assert split is not None
    ends = [0, *itertools.accumulate(split)]
    assert max(pieces.of(stage, *pair) for stage, pair in enumerate(itertools.pairwise(ends))) == 6
