"""Collectives whose work runs on streams, as NCCL's does, recorded on a device that is a simulation."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from device_stand_ins import SimulatedDevice

from shoal.parallel import Axis
from shoal.record import DeviceRecorder
from shoal.spec.timeline import Kind, Lane, Purpose, Timeline, explain

US = 1e-6
EXACT = 15 * US


class Work:
    """A collective on the stream "nccl": to wait for it makes the current stream wait, and not the host."""

    def __init__(self, device: SimulatedDevice, seconds: float) -> None:
        self._device = device
        device.follow("nccl")
        with device.beside("nccl"):
            device.launch(seconds)
            self._done = device.busy_until("nccl")

    def synchronize(self) -> None:
        self._device.wait_until(self._done)

    wait = synchronize


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    device = SimulatedDevice()
    monkeypatch.setattr(time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(time, "sleep", device.host_works)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    return device


def test_a_collective_lasts_from_its_tensors_to_its_end_and_delays_nothing(device, tmp_path) -> None:
    recorder = DeviceRecorder(tmp_path / "rank-00000.jsonl", 0, device)
    axis = Axis("dp", (0, 1), 0, None, recorder, Purpose.DATA)
    tensor = torch.zeros(256)
    origin = device.now
    with recorder.step(1), recorder.span(Kind.BACKWARD):
        device.launch(1000 * US)
        began = device.busy_until("compute")
        first = axis.begin("all_reduce:0", tensor, lambda: Work(device, 400 * US))
        second = axis.begin("all_reduce:1", tensor, lambda: Work(device, 300 * US))
        device.launch(500 * US)
        computed = device.busy_until("compute")
        assert computed == pytest.approx(began + 500 * US)  # beside both
        assert device.busy_until("nccl") == pytest.approx(began + 700 * US)
        device.host_works(3000 * US)  # the ends of spans do not wait for the host to ask
        first.wait()
        second.wait()
    device.run_out()
    recorder.close()

    timeline = Timeline.read(tmp_path)
    spans = {(span.kind, span.name): span for span in timeline}
    for number, (start, stop) in enumerate([(0, 400), (400, 700)]):
        span = spans[Kind.COLLECTIVE, f"all_reduce:{number}"]
        assert span.start == pytest.approx(began - origin + start * US, abs=EXACT)
        assert span.stop == pytest.approx(began - origin + stop * US, abs=EXACT)
        assert (span.lane, span.bytes, span.group, span.purpose) == (Lane.COMMUNICATION, 1024, (0, 1), "data")
    # The host came late: the device had nothing to wait for.
    assert spans[Kind.WAIT, "all_reduce:1"].duration < EXACT


def test_what_compute_waits_for_on_the_device_is_exposed(device, tmp_path) -> None:
    recorder = DeviceRecorder(tmp_path / "rank-00000.jsonl", 0, device)
    axis = Axis("dp", (0, 1), 0, None, recorder)
    with recorder.step(1), recorder.span(Kind.BACKWARD):
        device.launch(1000 * US)
        pending = axis.begin("all_reduce:0", torch.zeros(1), lambda: Work(device, 400 * US))
        device.launch(150 * US)
        pending.wait()
        device.launch(200 * US)
    device.run_out()
    recorder.close()
    parts = explain(Timeline.read(tmp_path)).parts
    assert parts.exposed_communication == pytest.approx(250 * US, abs=EXACT)
    assert parts.compute == pytest.approx(1350 * US, abs=EXACT)
    assert parts.communication == pytest.approx(400 * US, abs=EXACT)


def test_tensors_live_until_compute_waits(device, tmp_path) -> None:
    recorder = DeviceRecorder(tmp_path / "rank-00000.jsonl", 0, device)
    axis = Axis("dp", (0, 1), 0, None, recorder)
    tensor = torch.zeros(1)
    alive = weakref.ref(tensor)
    pending = axis.begin("all_reduce:0", tensor, lambda tensor=tensor: Work(device, tensor.item() + 1e-3))
    del tensor
    gc.collect()
    assert alive() is not None
    pending.wait()
    gc.collect()
    assert alive() is None


def test_messages_with_other_ranks_do_not_wait_for_one_another(device, tmp_path, monkeypatch) -> None:
    """NCCL has a communicator for each pair of ranks: a message that is late delays no other's span."""
    recorder = DeviceRecorder(tmp_path / "rank-00000.jsonl", 0, device)
    axis = Axis("pp", (0, 1, 2), 1, None, recorder, Purpose.PIPELINE)
    late, soon = Late(device, "from 0", 5e-3), Late(device, "to 2", 1e-3)
    monkeypatch.setattr(dist, "irecv", lambda tensor, peer, group: late)
    monkeypatch.setattr(dist, "isend", lambda tensor, peer, group: soon)
    pending = [axis.receive(torch.zeros(1), 0, "activation:1"), axis.send(torch.zeros(1), 2, "activation:2")]
    for each in pending:
        each.wait()
    device.run_out()
    recorder.close()
    spans = {span.name: span for span in Timeline.read(tmp_path) if span.kind == Kind.COLLECTIVE}
    assert spans["activation:1"].duration == pytest.approx(5e-3, abs=2 * EXACT)
    assert spans["activation:2"].duration == pytest.approx(1e-3, abs=2 * EXACT)


class Late(Work):
    """A message on a stream of its own."""

    def __init__(self, device: SimulatedDevice, stream: str, seconds: float) -> None:
        self._device = device
        self._done = device.now + seconds
