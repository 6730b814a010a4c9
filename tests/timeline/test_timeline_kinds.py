"""Seconds of a step by kind of span."""

from dataclasses import replace
from statistics import fmean, median

import pytest

from shoal.spec.timeline import Kind, Lane, Span, Timeline, explain, named_collectives
from shoal.spec.timeline.series import collective_series, kind_series, seconds_by_kind


def spans(rank, forward):
    """A step of 10 s: forward, of which 1 s is a wait for its collective; backward 4 s; optimizer 1 s."""
    collective = Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, "all_reduce:x", 1.0, 1.5, 1 << 20, (0, 1))
    return [
        Span(rank, Lane.COMPUTE, Kind.STEP, "1", 0.0, 10.0),
        Span(rank, Lane.COMPUTE, Kind.FORWARD, "", 0.0, forward),
        Span(rank, Lane.COMPUTE, Kind.WAIT, "all_reduce:x", 1.5, 1.0),
        collective,
        Span(rank, Lane.COMPUTE, Kind.BACKWARD, "", 5.0, 4.0),
        Span(rank, Lane.COMPUTE, Kind.OPTIMIZER, "", 9.0, 1.0),
    ]


def test_work_is_without_its_waits_and_the_mean_over_ranks():
    kinds = seconds_by_kind(Timeline([*spans(0, 3.0), *spans(1, 5.0)]))
    assert kinds["forward"] == pytest.approx((2.0 + 4.0) / 2)
    assert kinds["backward"] == pytest.approx(4.0)
    assert kinds["optimizer"] == pytest.approx(1.0)
    assert kinds["exposed_communication"] == pytest.approx(1.0)
    assert kinds["collective"] == pytest.approx(1.5)
    assert kinds["step"] == pytest.approx(10.0)


def test_series_have_the_medians_and_means_of_the_seconds_by_kind():
    # Steps of different lengths; the ranks' speeds differ, so that the quicker one waits.
    timeline = Timeline(
        shifted(span, 20.0 * index, index, 1 + index % 4 / 10)
        for index in range(12)
        for rank, forward in ((0, 3.0), (1, 5.0))
        for span in spans(rank, forward)
    )
    series, seconds = kind_series(timeline), seconds_by_kind(timeline)
    counted = explain(timeline).ranks[0].counted
    assert set(series) == set(seconds)
    for kind in ("step", "exposed_communication", "straggler_wait", "other", "collective"):
        assert fmean(series[kind][index] for index in counted) == pytest.approx(seconds[kind]), kind
    for kind in ("forward", "backward", "optimizer"):
        assert median(series[kind][index] for index in counted) == pytest.approx(seconds[kind]), kind
    (named,) = named_collectives(timeline)
    (values,) = collective_series(timeline).values()
    assert fmean(values[index] for index in counted) == pytest.approx(named.seconds)


def shifted(span, start, index, longer):
    """A span later, in a step that takes longer by a factor."""
    name = str(index) if span.kind == Kind.STEP else span.name
    return replace(span, name=name, start=start + span.start * longer, duration=span.duration * longer)
