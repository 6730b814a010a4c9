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
from device_stand_in import SimulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.record import DeviceRecorder
from shoal.timeline import Kind, Lane, Timeline, explain
from shoal.timeline.intervals import Intervals, intersect, length, subtract, union

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
        training = Training(device, Path(folder) / "rank-00000.jsonl", kernel=kernel, seed=seed)
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
        # The latency of the device is in the gaps between spans but not in what it idled for the host.
        assert parts.launch == pytest.approx(launches[index], abs=0.01 * parts.wall + 5 * EXACT)
