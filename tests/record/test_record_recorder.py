"""The recorder, read back as a Timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.record import NullRecorder, Recorder, SpanRecorder
from shoal.record.recorder import SpanFile, step_is_kept
from shoal.spec.timeline import Kind, Lane, Timeline, explain

FILE = "rank-00000.jsonl"


def record(directory: Path, use: Callable[[Recorder], None], *, rank: int = 0) -> Timeline:
    recorder = SpanRecorder(directory / f"rank-{rank:05d}.jsonl", rank)
    use(recorder)
    recorder.close()
    return Timeline.read(directory)


def test_spans_are_written_with_their_fields(tmp_path: Path) -> None:
    def use(recorder: Recorder) -> None:
        with recorder.span(Kind.FORWARD, "layer 3"):
            pass
        recorder.open(
            Kind.COLLECTIVE, "all_reduce:0", lane=Lane.COMMUNICATION, bytes=64, group=(0, 2)
        ).close()

    forward, collective = record(tmp_path, use)
    assert (forward.rank, forward.lane, forward.kind, forward.name) == (0, "compute", "forward", "layer 3")
    assert (collective.lane, collective.kind, collective.name) == (
        "communication",
        "collective",
        "all_reduce:0",
    )
    assert (collective.bytes, collective.group) == (64, (0, 2))


def test_groups_of_a_later_worker_are_written_as_ranks_of_all_workers(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path / "rank-00005.jsonl", 5, first=4)
    recorder.open(Kind.COLLECTIVE, lane=Lane.COMMUNICATION, group=(0, 1)).close()
    with recorder.span(Kind.FORWARD):
        pass
    recorder.close()
    collective, forward = Timeline.read(tmp_path)
    assert (collective.rank, collective.group, forward.group) == (5, (4, 5), ())


def test_starts_and_durations_are_those_of_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    recorder = SpanRecorder(tmp_path / FILE, 0)
    now = 101.0
    with recorder.step(0):
        now = 102.0
        with recorder.span(Kind.FORWARD):
            now = 104.0
        pending = recorder.open(Kind.COLLECTIVE, lane=Lane.COMMUNICATION)
        now = 107.0
        pending.close()
    recorder.close()
    timeline = Timeline.read(tmp_path)
    assert timeline.origin_unix_ns == 1_700_000_000_000_000_000
    assert [(s.kind, s.start, s.duration) for s in timeline] == [
        ("step", 1.0, 6.0),
        ("forward", 2.0, 2.0),
        ("collective", 4.0, 3.0),
    ]


def test_a_recorded_step_is_explained_to_the_last_moment(tmp_path: Path) -> None:
    def use(recorder: Recorder) -> None:
        with recorder.step(0):
            for kind in (Kind.DATA_WAIT, Kind.FORWARD, Kind.BACKWARD, Kind.WAIT, Kind.OPTIMIZER):
                with recorder.span(kind):
                    time.sleep(0.001)

    parts = explain(record(tmp_path, use)).parts
    assert sum(parts.disjoint().values()) == pytest.approx(parts.wall, rel=1e-9)
    # A sleep never ends early, so each span lasts at least its 1 ms; files round to the nanosecond.
    assert parts.compute >= 3 * 0.001 - 1e-8
    assert parts.data_wait >= 0.001 - 1e-8
    assert parts.exposed_communication >= 0.001 - 1e-8


def test_only_the_first_close_counts_whichever_thread_makes_it(tmp_path: Path) -> None:
    def use(recorder: Recorder) -> None:
        for _ in range(50):
            pending = recorder.open(Kind.COLLECTIVE, lane=Lane.COMMUNICATION)
            threads = [threading.Thread(target=pending.close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pending.close()

    assert len(record(tmp_path, use)) == 50


class _Interrupted(list):
    """Lets another thread append whenever it is read."""

    def __getitem__(self, key):
        taken = super().__getitem__(key)
        self.append((Kind.FORWARD, Lane.COMPUTE, "meanwhile", 0.0, 0.0, 0, (), "", "", None))
        return taken


def test_a_span_that_comes_while_the_buffer_is_taken_stays_for_the_next_time(tmp_path: Path) -> None:
    file = SpanFile(tmp_path / "rank.jsonl", 0, pytest.fail)
    file.spans = _Interrupted([(Kind.FORWARD, Lane.COMPUTE, "first", 0.0, 0.0, 0, (), "", "", None)])
    file.flush()
    assert [fields[2] for fields in file.spans] == ["meanwhile"]


def test_no_span_of_another_thread_is_lost_while_the_buffer_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.record.recorder._FLUSH_SECONDS", 0.0)

    def use(recorder: Recorder) -> None:
        def record_many() -> None:
            for _ in range(2000):
                recorder.open(Kind.COLLECTIVE, lane=Lane.COMMUNICATION).close()

        thread = threading.Thread(target=record_many)
        thread.start()
        index = 0
        while thread.is_alive():
            with recorder.step(index % 1000):
                index += 1
        thread.join()

    timeline = record(tmp_path, use)
    assert sum(span.kind == Kind.COLLECTIVE for span in timeline) == 2000


def test_spans_reach_the_file_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    recorder = SpanRecorder(tmp_path / FILE, 0)
    for index in range(25):
        with recorder.step(index):
            now += 0.1
    recorded = len(Timeline.read(tmp_path))
    recorder.close()
    assert recorded >= 19  # 2.5 s in: what is missing is at most the last second


@given(st.integers(0, 10_000_000))
def test_kept_steps_thin_out_by_tens(index: int) -> None:
    # Below 1,000 there are at most three digits; each digit more keeps one in ten of what it could.
    zeros = max(0, len(str(index)) - 3)
    assert step_is_kept(index) == (zeros == 0 or str(index).endswith("0" * zeros))


def test_a_long_run_keeps_900_steps_for_each_power_of_ten() -> None:
    assert [sum(map(step_is_kept, range(10**n))) for n in (3, 4, 5)] == [1000, 1900, 2800]


def test_the_spans_of_a_step_are_kept_or_dropped_with_it(tmp_path: Path) -> None:
    def use(recorder: Recorder) -> None:
        for index in (999, 1000, 1001):
            with recorder.step(index):
                pending = recorder.open(Kind.COLLECTIVE, f"{index}", lane=Lane.COMMUNICATION)
                with recorder.span(Kind.FORWARD, f"{index}"):
                    pass
            pending.close()  # after its step: it still belongs to it
            with recorder.span(Kind.VALIDATION, f"{index}"):
                pass

    timeline = record(tmp_path, use)
    for kind in (Kind.STEP, Kind.FORWARD, Kind.COLLECTIVE):
        assert [span.name for span in timeline if span.kind == kind] == ["999", "1000"]
    assert [span.name for span in timeline if span.kind == Kind.VALIDATION] == ["999", "1000", "1001"]


def test_a_step_that_fails_is_not_a_finished_step(tmp_path: Path) -> None:
    def use(recorder: Recorder) -> None:
        with recorder.step(0):
            pass
        with pytest.raises(KeyboardInterrupt), recorder.step(1), recorder.span(Kind.FORWARD):
            raise KeyboardInterrupt

    timeline = record(tmp_path, use)
    assert timeline.steps() == (0,)
    assert [span.kind for span in timeline] == ["step", "forward"]


def test_a_resumed_run_appends_below_a_torn_line(tmp_path: Path) -> None:
    def use(recorder: Recorder) -> None:
        with recorder.step(0):
            pass

    record(tmp_path, use)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind":"forw')
    timeline = record(tmp_path, use)
    assert [span.kind for span in timeline] == ["step", "step"]
    assert timeline.spans[0].stop <= timeline.spans[1].start


def test_a_full_disk_is_reported_once_and_stops_nothing() -> None:
    reports: list[str] = []
    # The kernel's own full disk: it opens, and refuses every write.
    recorder = SpanRecorder("/dev/full", 0, say=reports.append)
    for index in range(3):
        with recorder.step(index):
            pass
    recorder.close()
    recorder.close()
    assert len(reports) == 1
    assert "the timeline is no longer written to /dev/full: No space left on device" in reports[0]


def test_a_path_that_cannot_be_made_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the timeline is no longer written"):
        recorder = SpanRecorder(tmp_path / "file" / FILE, 0)
    with recorder.step(0), recorder.span(Kind.FORWARD):
        pass
    recorder.close()


def test_a_null_recorder_takes_the_same_calls_and_records_nothing() -> None:
    recorder: Recorder = NullRecorder()
    with recorder.step(0), recorder.span(Kind.FORWARD, "x", lane=Lane.COMPUTE, bytes=1, group=(0,)):
        pending = recorder.open(Kind.COLLECTIVE, lane=Lane.COMMUNICATION)
        pending.close()
        pending.close()
    recorder.close()
