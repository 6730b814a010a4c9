"""Events of CUDA on stand-ins of its streams; and the recorder on a GPU, where there is one."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shoal.record import DeviceRecorder, SpanRecorder, open_recorder
from shoal.record.cuda import CudaEvents
from shoal.spec.timeline import Kind, Timeline, explain

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, device: torch.device, priority: int) -> None:
        assert (device, priority) == (DEVICE, -1)
        self.waits_for: list[Stream] = []
        self.cycles: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.at > 0

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams that are current, innermost last."""
    streams = [Stream(DEVICE, -1)]

    @contextmanager
    def stream(chosen: Stream):
        streams.append(chosen)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: streams[-1].cycles.append(cycles))
    return streams


def test_events_are_recorded_on_the_stream_that_is_meant(current: list[Stream]) -> None:
    events = CudaEvents(DEVICE)
    first, second, aside, alone = (events.new_event() for _ in range(4))
    events.record(first)
    with events.beside("dp"):
        events.record(aside)
    with events.beside("dp"):
        assert current[-1] is aside.stream
    events.record(second)
    events.record_alone(alone)
    assert first.stream is second.stream is current[0]
    assert len({id(event.stream) for event in (first, aside, alone)}) == 3
    events.follow("dp")
    assert aside.stream.waits_for == [current[0]]


def test_the_kernel_of_a_hold_is_loaded_before_a_step_is_held(current: list[Stream]) -> None:
    events = CudaEvents(DEVICE)
    alone = events.new_event()
    events.record_alone(alone)
    assert alone.stream.cycles == [0]  # where no step waits for it
    events.hold(1.0)
    assert current[0].cycles[0] > 1e9


def test_seconds_are_those_between_events(current: list[Stream]) -> None:
    events = CudaEvents(DEVICE)
    first, second = events.new_event(), events.new_event()
    assert not events.is_complete(first)
    first.at, second.at = 250.0, 1750.0  # CUDA tells milliseconds
    assert events.is_complete(first)
    assert events.seconds_between(first, second) == 1.5


def test_a_cpu_is_recorded_by_the_host(tmp_path: Path) -> None:
    assert isinstance(open_recorder(tmp_path / "rank.jsonl", 0, torch.device("cpu")), SpanRecorder)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_spans_of_a_gpu_are_what_the_host_measures_when_it_waits(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path / "rank-00000.jsonl", 0, DEVICE)
    assert isinstance(recorder, DeviceRecorder)
    taken = {}
    for index in range(1, 11):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with recorder.step(index), recorder.span(Kind.FORWARD):
            torch.cuda._sleep(20_000_000)
        torch.cuda.synchronize()
        taken[index] = time.perf_counter() - began
    recorder.close()
    timeline = Timeline.read(tmp_path)
    steps = [span for span in timeline if span.kind == Kind.STEP]
    assert [int(span.name) for span in steps] == [1, 2, *range(4, 11)]
    for span in steps[1:]:
        assert span.duration == pytest.approx(taken[int(span.name)], rel=0.02, abs=200e-6)
    parts = explain(timeline).parts
    assert sum(parts.disjoint().values()) == pytest.approx(parts.wall, rel=0.01)
    assert parts.compute > 0.95 * parts.wall
