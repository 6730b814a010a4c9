"""Runs that grow, that were torn, and that are large: what the pages read of them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_stand_ins import LATE, SECOND, write_metrics, write_timeline

from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.errors import ShoalError
from shoal.spec.run import metrics_line, metrics_tail, read_metrics
from shoal.spec.run.metrics_tail import MetricsTail
from shoal.spec.run.timeline_files import TimelineFiles
from shoal.spec.timeline import Timeline
from shoal.spec.timeline.timeline import Tie, tie_line
from shoal.web.live import MEASURES, live
from shoal.web.query import MOST_POINTS, Query, thinned
from shoal.web.timeline import shown_spans, timeline

VALUES = st.fixed_dictionaries(
    {}, optional={"loss": st.floats(), "validation_loss": st.floats(0, 9), "tokens": st.integers(0, 99)}
)


def columns_of(tail):
    """What a MetricsTail holds, as `read_metrics` gives it."""
    found = []
    for at, step in enumerate(tail.steps):
        values = {name: tail.column(name)[at] for name in ("loss", "validation_loss", "tokens")}
        found.append((int(step), {name: value for name, value in values.items() if not math.isnan(value)}))
    return found


@given(st.lists(st.tuples(st.integers(0, 30), VALUES), max_size=40), st.data())
def test_columns_are_what_the_report_reads_however_the_file_grew(tmp_path_factory, lines, data):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    text = "".join(metrics_line(step, values) for step, values in lines)
    tail, at = MetricsTail(path), 0
    while at < len(text):
        more = data.draw(st.integers(1, len(text) - at))
        with path.open("a") as file:
            file.write(text[at : at + more])
        tail.refresh()
        at += more
    expected = [
        (step.pop("step"), {name: value for name, value in step.items() if not math.isnan(value)})
        for step in read_metrics(path)
    ]
    assert columns_of(tail) == expected
    assert tail.unreadable == 0


def test_lines_that_are_no_steps_are_counted_and_a_torn_one_is_waited_for(run):
    with run.metrics_file.open("a") as file:
        file.write(
            '{"step":"x"}\nnull\n[1]\n{"step":true}\n{"step":-1}\n\x00\xff\n' + "[" * 5000 + '\n{"step":31,'
        )
    tail = MetricsTail(run.metrics_file)
    tail.refresh()
    assert (tail.unreadable, len(tail)) == (7, 30)
    with run.metrics_file.open("a") as file:
        file.write('"loss":1}\n')
    tail.refresh()
    assert tail.last("loss") == (31, 1.0)


def test_a_file_that_is_replaced_is_read_anew(run):
    tail = MetricsTail(run.metrics_file)
    tail.refresh()
    run.metrics_file.unlink()
    write_metrics(run, [1, 2])
    assert tail.refresh()
    assert list(tail.steps) == [1, 2]


def test_a_large_file_is_sampled_first_and_then_read(run, monkeypatch):
    write_metrics(run, range(31, 20_001))
    monkeypatch.setattr(metrics_tail, "_LARGE", 1 << 16)
    tail = MetricsTail(run.metrics_file)
    tail.refresh()
    assert tail.is_sample
    assert 1000 < len(tail) < 5000
    assert tail.last("loss")[0] == 20_000
    tail.refresh()
    assert not tail.is_sample
    assert list(tail.steps) == list(range(1, 20_001))


@given(st.lists(st.floats(allow_nan=True), max_size=300), st.integers(4, 40))
def test_thinning_keeps_ends_and_extremes_and_no_more_than_asked(values, most):
    series = np.array(values, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(series))
    at = thinned(series, most)
    assert len(at) <= max(most, 0)
    assert np.all(np.diff(at) > 0)
    if len(finite):
        assert {finite[0], finite[-1]} <= set(at)
        assert series[at].min() == series[finite].min()
        assert series[at].max() == series[finite].max()


def test_a_long_run_sends_no_more_points_than_a_page_draws(run):
    write_metrics(run, range(31, 50_001))
    data = live(RunFollower(run), Query())
    assert sum(map(len, data["series"].values())) <= MOST_POINTS
    assert data["series"]["loss"][-1][0] == 50_000


@pytest.mark.parametrize(("first", "last"), [(1, 1), (5, 9), (30, 30), (25, 99)])
def test_steps_are_those_that_the_whole_timeline_has(run, first, last):
    files = TimelineFiles(run.timeline)
    files.refresh()
    whole = Timeline.read(run.timeline)
    last_there = min(last, 30)
    marks = [whole.step(rank, step) for rank in (0, 1) for step in (first, last_there)]
    expected = whole.window(min(mark.start for mark in marks), max(mark.stop for mark in marks))
    assert sorted(files.steps(first, last), key=str) == sorted(expected, key=str)


def test_steps_that_a_resumed_run_repeated_are_the_later_ones(run):
    write_timeline(run, range(21, 26), origin=1_700_000_100 * SECOND)  # resumed after step 20
    files = TimelineFiles(run.timeline)
    files.refresh()
    assert files.last_step() == 25
    assert [span.start for span in files.steps(22, 22) if span.kind == "step"] == pytest.approx([100.31] * 2)
    assert [span.start for span in files.steps(3, 3) if span.kind == "step"] == pytest.approx([0.62] * 2)
    assert [len(parts) for parts in files.restarts().values()] == [2, 2]


def test_a_file_that_grows_is_read_from_where_it_ended_and_a_torn_line_is_waited_for(run):
    files = TimelineFiles(run.timeline)
    files.refresh()
    assert not files.refresh()
    text = run.timeline_file(0).read_text().splitlines(keepends=True)[-1].replace('"30"', '"31"')
    for rank in (0, 1):
        with run.timeline_file(rank).open("a") as file:
            file.write(text[:20])
    assert not files.refresh(), "else a killed run would be explained again and again"
    assert files.last_step() == 30
    for rank in (0, 1):
        with run.timeline_file(rank).open("a") as file:
            file.write(text[20:])
    files.refresh()
    assert files.last_step() == 31


def test_hosts_are_read_on_one_clock_as_the_report_reads_them(run):
    for rank, host in ((0, "a"), (1, "b")):
        path = run.timeline_file(rank)
        header, _, rest = path.read_text().partition("\n")
        named = {**json.loads(header), "host": host, "origin_monotonic_ns": 5 * SECOND + rank}
        path.write_text(json.dumps(named, separators=(",", ":")) + "\n" + rest)
    ties = [Tie("b", "a", at * SECOND, at * SECOND + 7_000_000 + 1000 * at, 40_000) for at in range(5, 25, 2)]
    (run.timeline / "clock-00001.jsonl").write_text("".join(map(tie_line, ties)))
    files = TimelineFiles(run.timeline)
    files.refresh()
    whole = Timeline.read(run.timeline)
    found = files.steps(5, 9)
    assert {span.start for span in found} <= {span.start for span in whole}
    starts = {span.rank: span.start for span in found if (span.kind, span.name) == ("step", "5")}
    assert starts[1] - starts[0] == pytest.approx(0.007, abs=1e-4)
    assert found.clock_error == whole.clock_error


@pytest.mark.parametrize(
    "content",
    [
        b"{]\n",
        b'{"timeline":99,"rank":0,"origin_unix_ns":0}\n',
        b'{"timeline":1}\n',
        b'{"timeline":' + b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_a_file_that_is_no_timeline_is_named(run, content):
    run.timeline_file(0).write_bytes(content)
    with pytest.raises(ShoalError, match="rank-00000"):
        RunFollower(run).refresh()


def test_a_malformed_span_is_named(run):
    with run.timeline_file(1).open("r+b") as file:
        file.seek(200)
        file.write(b'"x"')
    files = TimelineFiles(run.timeline)
    files.refresh()
    with pytest.raises(ShoalError, match="rank-00001"):
        files.steps(1, 1)


def test_a_malformed_span_among_the_newest_is_told_each_time_and_not_read_again(run):
    path = run.timeline_file(1)
    path.write_text(path.read_text().replace('"duration":0.300000000}\n', '"duration":"x"}\n'))
    watched = RunFollower(run)
    for _ in range(2):
        with pytest.raises(ShoalError, match="rank-00001"):
            watched.refresh()
        assert not watched.is_behind


def test_few_spans_are_shown_as_they_are_and_many_keep_the_time_of_each_lane(run):
    whole = Timeline.read(run.timeline)
    few, shortest = shown_spans(whole, (0, 1), -1, 99)
    assert shortest == 0
    assert len(few) == len([span for span in whole if span.kind != "step"])
    merged, shortest = shown_spans(whole, (0, 1), -1, 99, most=40)
    assert len(merged) <= 40
    assert shortest > 0


def test_a_rank_that_comes_late_is_seen_in_the_map_and_not_in_the_time_of_its_backward(run):
    watched = RunFollower(run)
    heat = live(watched, Query({"measure": "late"}))["heat"]
    values = np.array(heat["values"])
    assert values[1] == pytest.approx(LATE / 2)  # after the middle of two ranks
    assert values[0] == pytest.approx(0)
    for measure in MEASURES:
        assert np.array(live(watched, Query({"measure": measure}))["heat"]["values"]).shape == values.shape


def test_texts_of_a_run_come_as_json_that_can_end_no_element(hostile):
    from shoal.web.query import encode

    watched = RunFollower(hostile)
    for page in (live, timeline):
        text = encode(page(watched, Query()))
        assert "<" not in text
        assert "window.taken" in text
        json.loads(text)
    assert live(watched, Query())["now"]["step"] == 31
