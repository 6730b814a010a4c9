"""A schedule found for given times keeps to its limit, and is never worse than a named one."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.spec.plan.schedules import (
    NAMES,
    Action,
    Schedule,
    Times,
    Work,
    looped,
    make,
    play,
    require_sound,
    search,
    v_shaped,
)
from shoal.spec.plan.schedules.common_order import received_makespan

ROUNDING = 1 + 1e-12  # sums of the same times in another order


def named(ranks, virtual, microbatches, limit):
    """The named schedules for these numbers that keep to the limit."""
    for name in NAMES:
        try:
            schedule = make(name, ranks, virtual, microbatches)
        except PlanError:
            continue
        if limit is None or peak(schedule) <= limit:
            yield schedule


def peak(schedule):
    return max(schedule.peak_activations(rank) for rank in range(schedule.ranks))


def some_times(stages, draw):
    each = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.25]), min_size=stages, max_size=stages)
    transfer = draw(st.sampled_from([0.0, 0.25, 1.0]))
    return Times(*(tuple(draw(each)) for _ in range(3)), (transfer,) * (stages - 1))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.data())
@settings(max_examples=40)
def test_what_is_found_is_sound_keeps_to_the_limit_and_beats_the_named(ranks, virtual, microbatches, data):
    times = some_times(ranks * virtual, data.draw)
    limit = data.draw(st.none() | st.integers(virtual, virtual * microbatches + 1))
    found = search(times, ranks, virtual, microbatches, limit)
    require_sound(found)
    assert limit is None or peak(found) <= limit
    makespan = play(found, times).makespan
    for schedule in named(ranks, virtual, microbatches, limit):
        assert makespan <= play(schedule, times).makespan * ROUNDING


def shortest(times, ranks, microbatches, limit):
    """The shortest makespan of all tables of one stage a rank whose ranks take micro-batches in order."""
    rows = []
    for rank in range(ranks):
        rows.append([row for row in orders(rank, microbatches) if held(row) <= limit])
    best = None
    for table in product(*rows):
        schedule = Schedule("any", ranks, 1, microbatches, tuple(range(ranks)), table)
        try:
            makespan = play(schedule, times).makespan
        except PlanError:
            continue
        best = makespan if best is None else min(best, makespan)
    return best


def orders(stage, microbatches):
    """All rows of one stage with F before I before W, and micro-batches in order."""

    def grow(row, counts):
        if counts == (microbatches,) * 3:
            yield tuple(row)
            return
        for place, work in enumerate((Work.FORWARD, Work.INPUT, Work.WEIGHT)):
            before = counts[place - 1] if place else microbatches
            if counts[place] < before:
                more = tuple(count + (place == index) for index, count in enumerate(counts))
                yield from grow([*row, Action(work, stage, counts[place])], more)

    yield from grow([], (0, 0, 0))


def held(row):
    now = most = 0
    for action in row:
        now += (action.work is Work.FORWARD) - (action.work is Work.WEIGHT)
        most = max(most, now)
    return most


@given(st.integers(1, 3), st.data())
@settings(max_examples=15)
def test_two_ranks_and_few_microbatches_get_what_trying_all_tables_finds(limit, data):
    microbatches = 3 if limit < 3 else 2
    times = some_times(2, data.draw)
    found = play(search(times, 2, 1, microbatches, limit), times).makespan
    assert found <= shortest(times, 2, microbatches, limit) * ROUNDING


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 8), st.booleans())
@settings(max_examples=20)
def test_a_placement_that_is_asked_for_is_kept(ranks, virtual, microbatches, is_v):
    placement = v_shaped(ranks) if is_v and virtual == 2 else looped(ranks, virtual)
    times = Times.equal(ranks * virtual)
    found = search(times, ranks, virtual, microbatches, None, placement)
    require_sound(found)
    assert found.placement == placement
    makespan = play(found, times).makespan
    for schedule in named(ranks, virtual, microbatches, None):
        if schedule.placement == placement:
            assert makespan <= play(schedule, times).makespan * ROUNDING


def test_another_placement_is_refused():
    with pytest.raises(PlanError, match="on the placement"):
        search(Times.equal(4), 2, 2, 4, None, (0, 0, 1, 1))


def test_memory_below_every_named_schedule_still_gives_one():
    for virtual in (1, 2):
        found = search(Times.equal(4 * virtual), 4, virtual, 8, virtual)
        require_sound(found)
        assert peak(found) == virtual


def test_more_memory_never_gives_a_longer_schedule_where_named_ones_tell():
    """More than ZB-V needs is of use when transfers take time."""
    times = Times.equal(8, 0.5, 0.65, 0.35, 0.1)
    zb_v = play(make("zb-v", 4, 2, 8), times).makespan
    assert play(search(times, 4, 2, 8, 8), times).makespan <= zb_v
    assert play(search(times, 4, 2, 8, 12), times).makespan < 0.97 * zb_v


def test_the_same_arguments_give_the_same_schedule():
    times = Times.equal(8, 0.5, 0.65, 0.35, 0.1)
    assert search(times, 4, 2, 8, 7) == search(times, 4, 2, 8, 7)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((4, 2, 8, 1), "at most 1 activations on a rank was asked for, and a rank has 2 stages"),
        ((4, 1, 8, 4), "times of 8 stages were given for a schedule of 4"),
        ((0, 2, 8, 4), "0 ranks"),
        ((4, 2, 0, 4), "0 micro-batches"),
    ],
)
def test_a_search_that_cannot_be_is_refused(asked, told):
    with pytest.raises(PlanError) as caught:
        search(Times.equal(8), *asked)
    assert told in caught.value.given


def test_among_equal_makespans_it_takes_one_whose_messages_arrive_in_time():
    """Transfers take nearly as long as forwards. Most tables with this makespan take 6 % longer in a step."""
    times = Times(
        (5.70, 6.61, 5.66, 6.47), (7.33, 8.50, 7.29, 7.77), (4.21, 4.91, 4.21, 4.88), (5.55, 0.0, 5.55)
    )
    found = search(times, 2, 2, 4, 8, v_shaped(2))
    assert play(found, times).makespan == pytest.approx(received_makespan(found, times), rel=1e-12)
