"""Verdicts on played timelines: one phase of one rank has a delay, and the verdict has to name both."""

import random
from statistics import fmean

import numpy as np
import pytest

import shoal
from shoal.analyze.diagnosis import Bottleneck, Cause, Pattern, Policy, verdict
from shoal.analyze.diagnosis.compute_time import PHASES, autocorrelation, best_period, errors_from_zero
from shoal.predict.simulate import mark_bubbles
from shoal.spec.timeline import Kind, Lane, Span, Timeline
from shoal.testing.delays import Delay, Jitter, Layout, delayed_timeline

STEPS = 34
LAYOUTS = {"dp": Layout(2), "dp x tp": Layout(2, 2), "dp x pp": Layout(2, 1, 2)}
CAUSES = [
    *(Cause.LOADER, Cause.COPY, Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER, Cause.OUTSIDE),
    Cause.MACHINE,
]


def jitter(sigma=0.02, ranks=8, steps=200):
    """Ratios with neighbours that are alike, as those of real steps are."""
    randomness = random.Random(7)
    series = []
    for _ in range(ranks):
        now, found = dict.fromkeys(PHASES, 0.0), []
        for _ in range(steps):
            now = {cause: 0.5 * now[cause] + randomness.gauss(0, sigma) for cause in PHASES}
            found.append({cause: 1 + value for cause, value in now.items()})
        series.append(found)
    return Jitter(series)


def judged(layout, delay=None, seed=0, **given):
    return verdict(mark_bubbles(delayed_timeline(layout, STEPS, jitter(), seed, delay)), **given)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_rank_and_the_phase_of_a_delay_are_named(layout, cause):
    rank = 1
    (straggler,) = judged(layout, Delay(rank, cause, 0.1), seed=CAUSES.index(cause)).stragglers
    assert (straggler.ranks, straggler.cause, straggler.pattern) == ((rank,), cause, Pattern.PERSISTENT)
    assert straggler.held_up > 0
    assert 0.05 < straggler.share < 0.12


def test_wall_times_of_backward_are_equal_where_the_verdict_finds_the_rank():
    timeline = delayed_timeline(Layout(4), STEPS, jitter(), 1, Delay(2, Cause.FORWARD, 0.1))
    backwards = [
        fmean(span.duration for span in timeline.of(rank) if span.kind == Kind.BACKWARD) for rank in range(4)
    ]
    assert min(backwards) == backwards[2], "the slow rank waits least, so its backward is the shortest"
    assert verdict(timeline).stragglers[0].ranks == (2,)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_clean_runs_have_no_straggler(layout):
    assert all(not judged(layout, seed=seed).stragglers for seed in range(2))


def test_a_delay_of_every_fifth_step_is_periodic():
    delay = Delay(1, Cause.LOADER, 0.5, lambda step: step % 5 == 0)
    (straggler,) = judged(Layout(2), delay).stragglers
    assert (straggler.pattern, straggler.period, straggler.cause) == (Pattern.PERIODIC, 5, Cause.LOADER)
    assert all(step % 5 == 0 for step in straggler.steps)


def test_a_delay_of_some_steps_in_a_row_happened_once():
    delay = Delay(0, Cause.FORWARD, 0.5, lambda step: 20 <= step < 24)
    (straggler,) = judged(Layout(2), delay).stragglers
    assert (straggler.pattern, straggler.steps) == (Pattern.ONCE, (20, 21, 22, 23))
    assert straggler.cause == Cause.FORWARD


def test_a_link_is_that_of_the_rank_which_all_slow_groups_share():
    for layout, rank in ((Layout(2, 2), 3), (Layout(2, 1, 2), 0)):
        (straggler,) = judged(layout, Delay(rank, Cause.LINK, 0.1)).stragglers
        assert (straggler.ranks, straggler.cause) == ((rank,), Cause.LINK)


def test_a_link_in_the_only_group_is_held_to_the_prediction():
    slow = delayed_timeline(Layout(2), STEPS, jitter(), 0, Delay(1, Cause.LINK, 0.1))
    assert verdict(slow).bottleneck == Bottleneck.NETWORK
    assert any("no predicted time" in each for each in verdict(slow).missing)
    predicted = {f"all_reduce:bucket {bucket}": 0.006 for bucket in range(4)}
    (straggler,) = verdict(slow, predicted=predicted).stragglers
    assert (straggler.ranks, straggler.cause) == ((0, 1), Cause.LINK)


def test_a_stage_without_peers_is_held_to_the_other_stages():
    found = judged(Layout(1, 1, 2), Delay(1, Cause.FORWARD, 0.2))
    assert [(each.ranks, each.cause) for each in found.stragglers] == [((1,), Cause.STAGE)]
    assert any("no other rank does the same work" in each for each in found.missing)


# --- bottlenecks -----------------------------------------------------------------------------------------


def one_rank(parts, steps=30):
    """A rank whose steps consist of these parts: kind, lane and seconds."""
    spans, now = [], 0.0
    for index in range(steps):
        begin = now
        for kind, seconds in parts:
            lane = Lane.COMMUNICATION if kind == Kind.COLLECTIVE else Lane.COMPUTE
            if kind is not None:
                spans.append(
                    Span(0, lane, kind, "all_reduce:0" if kind == Kind.COLLECTIVE else "", now, seconds)
                )
            now += seconds
        spans.append(Span(0, Lane.COMPUTE, Kind.STEP, str(index), begin, now - begin))
    return Timeline(spans)


@pytest.mark.parametrize(
    ("kind", "bottleneck"),
    [
        (Kind.DATA_WAIT, Bottleneck.DATA),
        (Kind.COLLECTIVE, Bottleneck.NETWORK),
        (Kind.BUBBLE, Bottleneck.BUBBLE),
        (None, Bottleneck.HOST),
    ],
)
def test_the_largest_part_other_than_compute_is_the_bottleneck(kind, bottleneck):
    found = verdict(one_rank([(Kind.FORWARD, 0.8), (kind, 0.2)]))
    assert found.bottleneck == bottleneck
    assert found.share == pytest.approx(0.2)
    assert found.advice


def test_a_host_that_gives_work_late_is_the_cause_launch():
    spans = []
    for rank, late in ((0, 0.0), (1, 0.1)):
        for index in range(30):
            begin = index * 1.5
            for kind, start, stop in (
                (Kind.FORWARD, 0.0, 0.4),
                (Kind.BACKWARD, 0.4 + late, 1.0 + late),
            ):
                host = begin + (start if late and kind == Kind.BACKWARD else 0.0)
                spans.append(
                    Span(rank, Lane.COMPUTE, kind, "", begin + start, stop - start, host=(host, host + 0.01))
                )
            arrival = begin + 1.0 + late
            given = rank, Lane.COMMUNICATION, Kind.COLLECTIVE, "all_reduce:0", arrival, begin + 1.2 - arrival
            spans.append(Span(*given, 8, (0, 1)))
            spans.append(
                Span(rank, Lane.COMPUTE, Kind.STEP, str(index), begin, 1.2, host=(begin, begin + 1.2))
            )
    (straggler,) = verdict(Timeline(spans)).stragglers
    assert (straggler.ranks, straggler.cause) == ((1,), Cause.LAUNCH)
    assert straggler.seconds == pytest.approx(0.1)


def test_compute_is_the_bottleneck_where_other_parts_are_small_and_memory_if_a_model_says_so():
    timeline = one_rank([(Kind.FORWARD, 0.95), (Kind.DATA_WAIT, 0.05)])
    assert verdict(timeline).bottleneck == Bottleneck.COMPUTE
    assert any("arithmetic" in each for each in verdict(timeline).missing)
    assert verdict(timeline, memory_share=0.8).bottleneck == Bottleneck.MEMORY


# --- abstaining ------------------------------------------------------------------------------------------


def test_too_few_steps_give_no_verdict():
    found = verdict(one_rank([(Kind.FORWARD, 1.0)], steps=10))
    assert (found.bottleneck, found.steps, found.stragglers) == (None, (), ())
    assert "8 steps" in found.missing[0]
    assert verdict(one_rank([(Kind.FORWARD, 1.0)], steps=10), policy=Policy(fewest_steps=8)).bottleneck


def test_a_rank_that_is_not_there_is_missing():
    whole = delayed_timeline(Layout(4), STEPS, jitter(), 1, Delay(2, Cause.FORWARD, 0.1))
    found = verdict(Timeline(span for span in whole if span.rank != 3))
    assert not found.stragglers
    assert any("ranks 3" in each for each in found.missing)


def test_one_rank_says_nothing_about_others():
    assert any("only one rank" in each for each in verdict(one_rank([(Kind.FORWARD, 1.0)])).missing)


def test_a_window_of_steps_is_judged_alone():
    delay = Delay(1, Cause.LOADER, 0.1, lambda step: step > 25)
    timeline = delayed_timeline(Layout(2), 50, jitter(), 0, delay)
    assert not verdict(timeline, last=25).stragglers
    (straggler,) = verdict(timeline, first=26).stragglers
    assert straggler.pattern == Pattern.PERSISTENT


def test_the_function_of_the_package_is_this_one():
    assert shoal.verdict is verdict


# --- statistics ------------------------------------------------------------------------------------------


def test_autocorrelation_is_that_of_numpy():
    values = np.random.default_rng(0).normal(size=60).cumsum()
    centred = values - values.mean()
    for lag in (1, 4, 11):
        expected = (centred[lag:] @ centred[:-lag]) / (60 - lag) / (centred @ centred / 60)
        assert autocorrelation(list(values), lag) == pytest.approx(expected)


def test_the_period_is_the_smallest_that_fits():
    assert best_period([float(step % 6 == 0) for step in range(60)])[0] == 6


def test_errors_from_zero_grow_with_the_number_of_independent_values():
    randomness = random.Random(3)
    values = [randomness.gauss(1, 1) for _ in range(400)]
    assert errors_from_zero(values) == pytest.approx(20 / 1.09, rel=0.25)
    assert errors_from_zero([value for value in values for _ in range(4)]) < 2 * errors_from_zero(values)
