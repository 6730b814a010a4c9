"""Events on the streams of a CUDA device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final

import torch

from shoal.record.device_recorder import DeviceEvents, DeviceRecorder
from shoal.record.recorder import Marks, Recorder, SpanRecorder

_CYCLES_PER_SECOND = 1.7e9
"""A usual clock of a GPU: a hold may be a third shorter or longer."""

# NCCL and torch.cuda.Stream() take turns at the 32 streams of normal priority. The recorder's streams are of
# the other pool, so that none of them is the same stream as one that works.
_PRIORITY = -1


@final
class CudaEvents(DeviceEvents):
    """See `DeviceEvents`.

    Args:
        device: The CUDA device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle = torch.cuda.Stream(device, priority=_PRIORITY)
        self._streams: dict[str, torch.cuda.Stream] = {}
        with torch.cuda.stream(self._idle):
            self.hold(0.0)  # the host loads a kernel when it is first started: not within a step

    def new_event(self) -> torch.cuda.Event:
        """See `DeviceEvents.new_event`."""
        return torch.cuda.Event(enable_timing=True)

    def record(self, event: torch.cuda.Event) -> None:
        """See `DeviceEvents.record`."""
        event.record(torch.cuda.current_stream(self._device))

    def record_alone(self, event: torch.cuda.Event) -> None:
        """See `DeviceEvents.record_alone`."""
        event.record(self._idle)

    def is_complete(self, event: torch.cuda.Event) -> bool:
        """See `DeviceEvents.is_complete`."""
        return bool(event.query())

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See `DeviceEvents.seconds_between`."""
        return float(first.elapsed_time(second)) / 1e3

    def beside(self, name: str) -> AbstractContextManager[object]:
        """See `DeviceEvents.beside`."""
        return torch.cuda.stream(self._stream(name))

    def follow(self, name: str) -> None:
        """See `DeviceEvents.follow`."""
        self._stream(name).wait_stream(torch.cuda.current_stream(self._device))

    def hold(self, seconds: float) -> None:
        """See `DeviceEvents.hold`."""
        torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self._device, priority=_PRIORITY)
        return self._streams[name]


def open_recorder(
    path: str | os.PathLike[str],
    rank: int,
    device: torch.device,
    *,
    say: Callable[[str], object] = warnings.warn,
    marks: Marks | None = None,
    first: int = 0,
) -> Recorder:
    """Return the recorder of a rank: by a CUDA device's events, by the host's clock on other devices.

    Args:
        path: The timeline file of the rank; a resumed run appends to it.
        rank: The global rank.
        device: The device on which the rank computes.
        say: Called with the report of a failure to record, one line.
        marks: Marks to make with each span.
        first: The global rank from which groups of spans count: workers count from the first of them.
    """
    if device.type == "cuda":
        return DeviceRecorder(path, rank, CudaEvents(device), say=say, marks=marks, first=first)
    return SpanRecorder(path, rank, say=say, marks=marks, first=first)
