"""The way of a micro-batch to a device that is a simulation."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device_stand_ins import SimulatedDevice

from shoal.record import DeviceRecorder
from shoal.spec.timeline import Kind, Lane, Timeline, explain
from shoal.train.micro_batch import Inputs


def test_copies_have_a_lane_and_compute_s_wait_for_them_is_data_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = SimulatedDevice()

    def stream(name: str) -> SimpleNamespace:
        def wait_stream(other: SimpleNamespace) -> None:
            with device.beside(name):
                device.wait_for(other.name)

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    monkeypatch.setattr(time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(time, "sleep", device.host_works)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("compute"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: device.beside(stream.name))
    recorder = DeviceRecorder(tmp_path / "rank-00000.jsonl", 0, device)
    inputs = Inputs(torch.device("cuda", 0), recorder)
    micro_batch = SimpleNamespace(map=lambda copied: device.launch(2e-3))
    with recorder.step(1):
        inputs.move(micro_batch)  # type: ignore[arg-type]
        with recorder.span(Kind.FORWARD):
            device.launch(5e-3)
    device.run_out()
    recorder.close()
    timeline = Timeline.read(tmp_path)
    (copy,) = (span for span in timeline if span.lane == Lane.COPY)
    assert copy.duration == pytest.approx(2e-3, abs=15e-6)
    parts = explain(timeline).parts
    assert parts.data_wait == pytest.approx(2e-3, abs=15e-6)
    assert parts.compute == pytest.approx(5e-3, abs=15e-6)
