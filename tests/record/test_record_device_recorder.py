"""The recorder of a device, on a device that is a simulation."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from device_stand_ins import Event, SimulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.record import DeviceRecorder
from shoal.spec.timeline import Kind, Lane, Timeline, explain
from shoal.spec.timeline.intervals import Intervals, intersect, length, subtract, union

FILE = "rank-00000.jsonl"
EXACT = 15e-6
"""Seconds: the bounds of a tie are as far apart."""

WORK = {Kind.FORWARD: 60, Kind.BACKWARD: 120, Kind.OPTIMIZER: 20}
"""The kernels of each span."""


class Training:
    """Steps of a program on a simulated device, recorded, and what truly happened.

    Attributes:
        device: The device.
        recorder: Its recorder.
        true: Kind, name, start and stop of each span that was recorded.
    """

    def __init__(self, device: SimulatedDevice, file: Path, *, kernel: float, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.device = device
        self.recorder = DeviceRecorder(file, 0, device)
        self._origin = 100.0
        self.true: list[tuple[str, str, float, float]] = []
        self._steps: dict[int, Intervals] = {}
        self._kernels = {
            kind: [kernel * self._random.uniform(0.2, 2) for _ in range(count)]
            for kind, count in WORK.items()
        }

    @contextmanager
    def span(self, kind: Kind, name: str = "") -> Iterator[None]:
        with self.recorder.span(kind, name):
            start = self.device.marks[-1]
            yield
        self.true.append((kind, name, start - self._origin, self.device.marks[-1] - self._origin))

    def step(self, index: int, *, launch: float, held: bool = False) -> None:
        """Make a step whose kernels take the host `launch` seconds each."""
        device = self.device
        began = len(self.true)
        with self.recorder.step(index):
            start = device.marks[-1]
            with self.span(Kind.DATA_WAIT):
                device.host_works(self._random.choice([0.0, 2e-3]))
            for kind, kernels in self._kernels.items():
                with self.span(kind):
                    for number, seconds in enumerate(kernels):
                        device.launch(seconds, host=launch)
                        if kind == Kind.BACKWARD and number % 50 == 25:
                            self._reduce(str(number))
                    if kind == Kind.BACKWARD:
                        for number in (25, 75):
                            with self.span(Kind.WAIT, f"all_reduce:{number}"):
                                device.wait_for(f"axis {number}")
                device.host_works(self._random.choice([0.0, 1e-3]))
        self.true.append(
            (
                Kind.HELD_STEP if held else Kind.STEP,
                str(index),
                start - self._origin,
                device.marks[-1] - self._origin,
            )
        )
        if not held:
            excused = union(span[2:] for span in self.true[began:] if span[0] in (Kind.DATA_WAIT, Kind.WAIT))
            self._steps[index] = subtract([self.true[-1][2:]], excused)

    def _reduce(self, name: str) -> None:
        """Reduce on a stream of its own; the first reduction lasts longer than the second."""
        device, stream = self.device, f"axis {name}"
        device.follow(stream)
        with device.beside(stream):
            pending = self.recorder.open(
                Kind.COLLECTIVE, f"all_reduce:{name}", lane=Lane.COMMUNICATION, bytes=8
            )
            start = device.marks[-1]
            device.launch(3e-3 if name == "25" else 1e-3)
            pending.close()
        self.true.append(
            (Kind.COLLECTIVE, f"all_reduce:{name}", start - self._origin, device.marks[-1] - self._origin)
        )

    def end(self) -> None:
        self.device.launch(0.0)
        self.device.run_out()
        self.recorder.close()

    def launch(self) -> dict[int, float]:
        """For each step that is not held, the true seconds in which the device idled for the host."""
        idle = union((start - self._origin, stop - self._origin) for start, stop in self.device.idle)
        return {index: length(intersect(idle, step)) for index, step in self._steps.items()}


@contextmanager
def clock_of(device: SimulatedDevice) -> Iterator[None]:
    """Let the host's clock be the simulation's; to sleep is to wait, which only `close` may do."""
    with (
        patch.object(time, "perf_counter", lambda: device.now),
        patch.object(time, "time_ns", lambda: 0),
        patch.object(time, "sleep", device.host_works),
    ):
        yield


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(drift=3e-5)
    with clock_of(device):
        yield device


def by_start(spans: list[tuple[str, str, float, float]]) -> list[tuple[str, str, float, float]]:
    return sorted(spans, key=lambda span: (span[0], span[1], span[2]))


@settings(max_examples=25, deadline=None)
@given(
    launch=st.sampled_from([5e-6, 15e-6, 40e-6]),
    kernel=st.sampled_from([5e-6, 20e-6, 100e-6]),
    drift=st.floats(-1e-4, 1e-4),
    seed=st.integers(0, 1000),
)
def test_spans_and_launch_are_those_of_the_device(
    launch: float, kernel: float, drift: float, seed: int
) -> None:
    device = SimulatedDevice(drift=drift)
    with tempfile.TemporaryDirectory() as folder, clock_of(device):
        training = Training(device, Path(folder) / FILE, kernel=kernel, seed=seed)
        for index in range(1, 13):
            training.step(index, launch=launch, held=index == 3)
        training.end()
        timeline = Timeline.read(folder)
    written = by_start([(span.kind, span.name, span.start, span.stop) for span in timeline])
    true = by_start(training.true)
    assert [span[:2] for span in written] == [span[:2] for span in true]
    for found, expected in zip(written, true, strict=True):
        assert found[2:] == pytest.approx(expected[2:], abs=EXACT)

    steps, launches = explain(timeline).of(0).steps, training.launch()
    assert sorted(steps) == sorted(launches) == [1, 2, *range(4, 13)]
    for index, parts in steps.items():
        assert sum(parts.disjoint().values()) == pytest.approx(parts.wall, rel=1e-9)
        assert all(part >= -1e-12 for part in parts.disjoint().values())
        assert parts.launch == pytest.approx(launches[index], abs=3 * EXACT)


def test_of_spans_longer_than_the_queue_launch_is_not_told_too_long(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    """The host waits where the device has 1,024 launches: it cannot give all of such a span ahead."""
    recorder = DeviceRecorder(tmp_path / FILE, 0, device)
    for index in range(1, 6):
        with recorder.step(index), recorder.span(Kind.FORWARD):
            for _ in range(4000):
                device.launch(5e-6, host=15e-6)
        device.run_out()
    recorder.close()
    parts = explain(Timeline.read(tmp_path)).of(0).steps[5]
    # In truth two thirds of the step; while held, the host is ahead for about 1,500 of 4,000 launches.
    assert 0.2 * parts.wall < parts.launch < 0.67 * parts.wall


def test_nothing_waits_for_the_device_while_it_works(device: SimulatedDevice, tmp_path: Path) -> None:
    recorder = DeviceRecorder(tmp_path / FILE, 0, device)
    began, spans = device.now, 0
    with patch.object(time, "sleep", pytest.fail):
        for index in range(1, 51):
            with recorder.step(index):
                for _ in range(10):
                    with recorder.span(Kind.FORWARD):
                        device.launch(5e-3)  # the device is seconds behind at the end
                    spans += 1
    assert device.busy_until("compute") - began > 2
    # What the host was kept: marks of spans and steps, launches, and the queries of ties that cannot end.
    assert device.now - began < 0.01


def test_events_are_used_again(device: SimulatedDevice, tmp_path: Path) -> None:
    recorder = DeviceRecorder(tmp_path / FILE, 0, device)
    made = []
    for index in range(1, 1000):
        with recorder.step(index):
            for _ in range(10):
                with recorder.span(Kind.FORWARD):
                    device.launch(100e-6)
            device.run_out()
        made.append(device.made)
    # Two for each of 11 spans in a tenth of a second, and one for each tie.
    steps = 1 + 0.1 / (device.now - 100) * 1000
    ties = (device.now - 100) / 0.1
    assert made[-1] <= 2 * 11 * (steps + 2) + ties + 2
    assert made[-1] - made[500] <= ties
    recorder.close()


def test_spans_that_end_out_of_order_are_all_written(device: SimulatedDevice, tmp_path: Path) -> None:
    recorder = DeviceRecorder(tmp_path / FILE, 0, device)
    with device.beside("slow"):
        pending = recorder.open(Kind.COLLECTIVE, "slow", lane=Lane.COMMUNICATION)
        device.launch(0.5)
        pending.close()
    for index in range(4, 10):
        with recorder.step(index), recorder.span(Kind.FORWARD, str(index)):
            device.launch(0.06)
        device.host_works(0.06)
    recorder._file.flush()
    early = {(span.kind, span.name) for span in Timeline.read(tmp_path)}
    assert (Kind.FORWARD, "7") in early
    assert (Kind.COLLECTIVE, "slow") not in early
    device.run_out()
    recorder.close()
    slow, *_ = (span for span in Timeline.read(tmp_path) if span.name == "slow")
    assert slow.duration == pytest.approx(0.5, abs=EXACT)


def test_a_copy_is_on_its_own_lane_and_a_host_may_end_a_span(device: SimulatedDevice, tmp_path: Path) -> None:
    recorder = DeviceRecorder(tmp_path / FILE, 0, device)
    origin = device.now
    with recorder.step(1):
        with device.beside("copies"), recorder.span(Kind.COPY, "inputs", lane=Lane.COPY, bytes=64):
            device.launch(2e-3)
        with recorder.span(Kind.FORWARD):
            device.launch(5e-3)
        pending = recorder.open(Kind.COLLECTIVE, "all_reduce:0", lane=Lane.COMMUNICATION)
        device.host_works(8e-3)
        pending.close(at=device.now - 1e-3, algorithm="ring")
        ended = device.now - 1e-3
        pending.close()
    device.run_out()
    recorder.close()
    spans = {span.kind: span for span in Timeline.read(tmp_path)}
    assert (spans[Kind.COPY].lane, spans[Kind.COPY].bytes) == (Lane.COPY, 64)
    assert spans[Kind.COPY].duration == pytest.approx(2e-3, abs=EXACT)
    assert spans[Kind.COLLECTIVE].stop == pytest.approx(ended - origin, abs=EXACT)
    assert spans[Kind.COLLECTIVE].algorithm == "ring"
    assert explain(Timeline.read(tmp_path)).parts.compute == pytest.approx(5e-3, abs=EXACT)


def test_steps_are_dropped_as_on_the_host_and_held_ones_never(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    recorder = DeviceRecorder(tmp_path / FILE, 0, device)
    for index in range(1999, 2041):
        with recorder.step(index), recorder.span(Kind.FORWARD, str(index)):
            device.launch(1e-3, host=1e-4)
        device.run_out()
    with pytest.raises(KeyError), recorder.step(2050):
        raise KeyError
    recorder.close()
    timeline = Timeline.read(tmp_path)
    assert timeline.steps() == (2000, 2010, 2020, 2030, 2040)
    assert [span.name for span in timeline if span.kind == Kind.HELD_STEP] == ["2001", "2028"]
    assert [span.name for span in timeline if span.kind == Kind.FORWARD] == [
        *("2000", "2001", "2010", "2020", "2028", "2030", "2040")
    ]


def test_a_clock_with_drift_is_followed_for_hours(device: SimulatedDevice, tmp_path: Path) -> None:
    recorder = DeviceRecorder(tmp_path / FILE, 0, device)
    origin = device.now
    for index in range(1, 400):  # 3 hours; the device's clock gains a third of a second
        with recorder.step(index), recorder.span(Kind.FORWARD, str(index)):
            device.launch(1.0)
        began = device.marks[-3] - origin
        device.host_works(27.0)
    recorder.close()
    last = [span for span in Timeline.read(tmp_path) if span.kind == Kind.FORWARD][-1]
    assert last.start == pytest.approx(began, abs=1e-3)


def test_a_device_that_is_slow_to_answer_is_followed_as_well(device: SimulatedDevice, tmp_path: Path) -> None:
    """Streams may share a queue: then the event of a tie completes when compute does."""

    def record_behind_compute(event: Event) -> None:
        event.at = max(device.now, device.busy_until("compute"))

    recorder = DeviceRecorder(tmp_path / FILE, 0, device)
    origin, began = device.now, []
    with patch.object(device, "record_alone", record_behind_compute):
        for index in range(4, 40):
            with recorder.step(index), recorder.span(Kind.FORWARD):
                device.launch(0.05)
            began.append(device.marks[-3] - origin)
            device.host_works(0.045)
        device.run_out()
        recorder.close()
    found = [span.start for span in Timeline.read(tmp_path) if span.kind == Kind.FORWARD]
    # In 2 s the clocks drift apart by 60 us.
    assert found == pytest.approx(began, abs=1e-4)


def test_a_device_that_never_ends_is_waited_for_only_for_seconds(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    reports: list[str] = []
    recorder = DeviceRecorder(tmp_path / FILE, 0, device, say=reports.append)
    with recorder.step(1):
        with recorder.span(Kind.FORWARD):
            device.launch(1e-3)
        with device.beside("hangs"):
            pending = recorder.open(Kind.COLLECTIVE, lane=Lane.COMMUNICATION)
            device.launch(1e9)
            pending.close()
    began = device.now
    recorder.close()
    recorder.close()
    assert device.now - began < 10
    assert reports == ["the timeline lacks 1 spans that have not ended on the device"]
    assert {span.kind for span in Timeline.read(tmp_path)} == {Kind.STEP, Kind.FORWARD}


def test_a_device_that_fails_ends_the_record_and_not_the_run(device: SimulatedDevice, tmp_path: Path) -> None:
    reports: list[str] = []
    recorder = DeviceRecorder(tmp_path / FILE, 0, device, say=reports.append)

    def fail(event: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with patch.object(device, "is_complete", fail):
        for index in range(1, 4):
            with recorder.step(index), recorder.span(Kind.FORWARD):
                device.host_works(0.2)
        recorder.close()
    assert len(reports) == 1
    assert "illegal memory access" in reports[0]
