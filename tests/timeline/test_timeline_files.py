"""Timelines and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.spec.timeline import Kind, Lane, Span, Timeline
from shoal.spec.timeline.span import header_line, parse_span, span_line

HEADER = header_line(0, 5_000_000_000)
FORWARD = span_line(Kind.FORWARD, Lane.COMPUTE, "", 1.0, 0.5, 0, ())
BACKWARD = span_line(Kind.BACKWARD, Lane.COMPUTE, "", 1.5, 0.5, 0, ())

spans = st.builds(
    Span,
    rank=st.integers(0, 3),
    lane=st.sampled_from([lane.value for lane in Lane]),
    kind=st.sampled_from([kind.value for kind in Kind if kind != Kind.STEP]),
    name=st.text(max_size=8),
    start=st.floats(0, 1e5),
    duration=st.floats(0, 1e3),
    bytes=st.integers(0, 2**50),
    group=st.lists(st.integers(0, 5000), max_size=4).map(tuple),
)


def write(directory: Path, *texts: str) -> Path:
    for rank, text in enumerate(texts):
        (directory / f"rank-{rank:05d}.jsonl").write_text(text)
    return directory


@given(spans)
def test_a_span_survives_its_line(span: Span) -> None:
    fields = json.loads(
        span_line(span.kind, span.lane, span.name, span.start, span.duration, span.bytes, span.group)
    )
    read = parse_span(fields, rank=span.rank, offset=0.0)
    # Files round times to the nanosecond.
    assert read.start == pytest.approx(span.start, rel=0, abs=1e-9)
    assert read.duration == pytest.approx(span.duration, rel=0, abs=1e-9)
    for name in ("rank", "lane", "kind", "name", "bytes", "group"):
        assert getattr(read, name) == getattr(span, name)


def test_a_timeline_survives_its_directory(tmp_path: Path) -> None:
    written = Timeline(
        [
            Span(1, "communication", "collective", "all_reduce:0", 0.25, 0.125, 64, (0, 1)),
            Span(0, "compute", "step", "0", 0.0, 1.0),
        ],
        origin_unix_ns=1_700_000_000_123_456_789,
    )
    written.write(tmp_path / "timeline")
    read = Timeline.read(tmp_path / "timeline")
    assert read.spans == written.spans
    assert read.origin_unix_ns == written.origin_unix_ns


def test_ranks_are_aligned_by_their_origins(tmp_path: Path) -> None:
    write(tmp_path, header_line(0, 5_000_000_000) + FORWARD, header_line(1, 3_000_000_000) + FORWARD)
    timeline = Timeline.read(tmp_path)
    assert timeline.origin_unix_ns == 3_000_000_000
    assert [(span.rank, span.start) for span in timeline] == [(1, 1.0), (0, 3.0)]


def test_a_resumed_run_goes_on_with_a_new_origin(tmp_path: Path) -> None:
    write(tmp_path, HEADER + FORWARD + header_line(0, 65_000_000_000) + BACKWARD)
    assert [(s.kind, s.start) for s in Timeline.read(tmp_path)] == [("forward", 1.0), ("backward", 61.5)]


@pytest.mark.parametrize("cut", range(1, len(BACKWARD)))
def test_a_last_line_torn_anywhere_is_passed_over(tmp_path: Path, cut: int) -> None:
    write(tmp_path, HEADER + FORWARD + BACKWARD[:cut])
    whole = cut == len(BACKWARD) - 1  # only the newline is missing
    assert len(Timeline.read(tmp_path)) == 1 + whole


def test_a_line_torn_before_a_later_header_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, HEADER + FORWARD + BACKWARD[:20] + "\n" + HEADER + BACKWARD)
    assert [span.kind for span in Timeline.read(tmp_path)] == ["forward", "backward"]


def test_a_torn_header_alone_is_an_empty_timeline(tmp_path: Path) -> None:
    write(tmp_path, HEADER[:10])
    assert len(Timeline.read(tmp_path)) == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (HEADER + FORWARD[:20] + "\n" + BACKWARD, 2),
        (HEADER + FORWARD[:20] + "\n" + BACKWARD[:20] + "\n", 2),
        (HEADER + FORWARD + '{"kind":"forward"}\n', 3),
        (HEADER + '{"kind":"nap","start":0,"duration":1}\n', 2),
        (HEADER + '{"kind":"step","name":"x","start":0,"duration":1}\n', 2),
        (HEADER + "[1, 2]\n", 2),
        (FORWARD, 1),
        ('{"timeline":1}\n', 1),
        ('{"timeline":99,"rank":0,"origin_unix_ns":0}\n', 1),
    ],
)
def test_a_malformed_file_is_refused_with_its_name_and_line(tmp_path: Path, text: str, line: int) -> None:
    write(tmp_path, text)
    with pytest.raises(ShoalError, match=f"rank-00000.jsonl:{line}:"):
        Timeline.read(tmp_path)


def test_a_directory_without_files_is_an_empty_timeline(tmp_path: Path) -> None:
    timeline = Timeline.read(tmp_path / "absent")
    assert (len(timeline), timeline.ranks, timeline.steps()) == (0, (), ())


def test_a_window_holds_the_spans_that_reach_into_it() -> None:
    timeline = Timeline([Span(0, "compute", "forward", str(i), float(i), 1.0) for i in range(5)])
    assert [span.name for span in timeline.window(1.5, 3.0)] == ["1", "2"]


def test_steps_are_those_that_any_rank_finished() -> None:
    timeline = Timeline([Span(r, "compute", "step", str(i), i, 1.0) for r, i in [(0, 0), (1, 0), (1, 10)]])
    assert timeline.steps() == (0, 10)
    assert timeline.step(0, 10) is None
    assert timeline.step(1, 10) == timeline.spans[-1]
