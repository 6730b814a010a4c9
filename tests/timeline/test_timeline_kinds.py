"""Seconds of a step by kind of span."""

import pytest

from shoal.timeline import Kind, Lane, Span, Timeline
from shoal.timeline.kinds import seconds_by_kind


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
