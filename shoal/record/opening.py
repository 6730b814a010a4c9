"""Choose the recorder for the device that a rank computes on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch

from shoal.record.cuda import CudaEvents
from shoal.record.device_recorder import DeviceRecorder
from shoal.record.marks import Marks
from shoal.record.recorder import Recorder, SpanRecorder


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
