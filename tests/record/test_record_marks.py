"""Marks beside spans, for tools of others."""

from contextlib import contextmanager

import pytest

from shoal.record import Marks, SpanRecorder
from shoal.spec.timeline import Kind, Timeline


def test_each_span_is_marked_while_marks_are_asked_for_also_in_dropped_steps(tmp_path):
    marks, log = Marks(), []

    @contextmanager
    def mark(name):
        log.append(f"+{name}")
        try:
            yield
        finally:
            log.append(f"-{name}")

    recorder = SpanRecorder(tmp_path / "rank-00000.jsonl", 0, marks=marks)
    with recorder.step(1), recorder.span(Kind.FORWARD):
        pass
    marks.new = mark
    with recorder.step(1_001), recorder.span(Kind.FORWARD, "block 1"):  # of which one in ten is kept
        log.append("inside")
    with pytest.raises(ValueError), recorder.step(1_010), recorder.span(Kind.BACKWARD):
        raise ValueError
    marks.new = None
    with recorder.step(2), recorder.span(Kind.FORWARD):
        pass
    recorder.close()
    assert log == ["+forward block 1", "inside", "-forward block 1", "+backward", "-backward"]
    assert [span.kind for span in Timeline.read(tmp_path)].count(Kind.FORWARD) == 2
