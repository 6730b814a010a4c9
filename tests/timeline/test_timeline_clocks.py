"""One clock for all hosts: shifted and drifting clocks are put right, from measurements with errors."""

import json
import random

import pytest

from shoal.spec.timeline import Timeline
from shoal.spec.timeline.span import header_line, span_line
from shoal.spec.timeline.timeline import Tie, fit, tie_line

SECOND = 1_000_000_000
UNIX = 1_700_000_000 * SECOND


class Host:
    """A host whose monotonic clock began at another time and runs at another rate, which changes slowly."""

    def __init__(self, start, drift, sway=0.0):
        self.start, self.drift, self.sway = start, drift, sway

    def monotonic(self, true):
        return self.start * SECOND + round(true * (1 + self.drift) * SECOND + self.sway * true**2 * SECOND)


def ties_of(host, reference, seconds, every=5.0, way=(20e-6, 80e-6), seed=0):
    """Measurements whose packets take another time there than back."""
    randomness = random.Random(seed)
    found, true = [], 0.0
    while true < seconds:
        there, back = randomness.uniform(*way), randomness.uniform(*way)
        if randomness.random() < 0.2:
            there += 2e-3  # a queue on the way
        here = (host.monotonic(true) + host.monotonic(true + there + back)) // 2
        error = round((there + back) / 2 * SECOND)
        found.append(Tie("b", "a", here, reference.monotonic(true + there), error))
        true += every
    return found


@pytest.mark.parametrize(("drift", "sway"), [(0.0, 0.0), (80e-6, 0.0), (-40e-6, 5e-9)])
def test_events_at_one_moment_have_one_time(tmp_path, drift, sway):
    a, b = Host(100, 0.0), Host(90_000, drift, sway)
    moments = [10.0 * each for each in range(31)]
    for rank, (name, host, wall_error) in enumerate([("a", a, 0), ("b", b, 3 * SECOND)]):
        begin = 1.0 + rank
        origin = host.monotonic(begin)
        lines = [header_line(rank, UNIX + round(begin * SECOND) + wall_error, name, origin)]
        for moment in moments:
            start = (host.monotonic(moment + 2) - origin) / SECOND
            lines.append(span_line("other", "compute", "", start, 0.001, 0, ()))
        (tmp_path / f"rank-{rank:05d}.jsonl").write_text("".join(lines))
    assert Timeline.read(tmp_path).clock_error is None
    torn = tie_line(ties_of(b, a, 5)[0])[:20]
    (tmp_path / "clock-00001.jsonl").write_text("".join(map(tie_line, ties_of(b, a, 310))) + torn)
    timeline = Timeline.read(tmp_path)
    assert 0 < timeline.clock_error < 200e-6
    for one, other in zip(timeline.of(0), timeline.of(1), strict=True):
        assert other.start == pytest.approx(one.start, abs=100e-6)


def test_ranks_of_a_host_share_its_clock_whatever_the_wall_clock_said(tmp_path):
    for rank, wall in ((0, UNIX), (1, UNIX + 30 * SECOND)):
        text = header_line(rank, wall, "a", (5 + rank) * SECOND)
        (tmp_path / f"rank-{rank:05d}.jsonl").write_text(
            text + span_line("other", "compute", "", 9.0 - rank, 0.001, 0, ())
        )
    timeline = Timeline.read(tmp_path)
    assert [span.start for span in timeline] == [9.0, 9.0]
    assert timeline.clock_error == 0.0


def test_a_line_through_measurements_has_the_drift_of_the_clock():
    host, reference = Host(7, 50e-6), Host(3, 0.0)
    found = fit(ties_of(host, reference, 100))
    for true in (0.0, 33.3, 95.0):
        expected = (reference.monotonic(true) - host.monotonic(true) - found.base_ns) / SECOND
        assert found.offset(host.monotonic(true)) == pytest.approx(expected, abs=60e-6)
    assert fit([]) is None


def test_a_measurement_that_is_no_measurement_is_passed_over(tmp_path):
    (tmp_path / "rank-00000.jsonl").write_text(header_line(0, UNIX, "a", 0))
    lines = ["[]", "{}", json.dumps({"host": "a", "reference": "b", "monotonic_ns": "x"}), '{"host":', "\0"]
    (tmp_path / "clock-00000.jsonl").write_text("\n".join(lines))
    assert Timeline.read(tmp_path).clock_error == 0.0
