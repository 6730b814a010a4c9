"""The way of a micro-batch from the host to the device."""

from __future__ import annotations

from typing import final

import torch

from shoal.record import NullRecorder, Recorder
from shoal.timeline import Kind, Lane
from shoal.train.micro_batch import MicroBatch


@final
class Inputs:
    """Move micro-batches to a device, on a GPU by a stream of their own.

    The copies run beside the compute that the device still has to do, from pinned memory: from ordinary
    memory the driver copies at a twentieth of the rate, and the host waits for it.

    Args:
        device: Device on which this rank computes.
        recorder: Recorder of the spans of copies, and on a GPU of compute's wait for them.
    """

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        self._device = device
        self._recorder = NullRecorder() if recorder is None else recorder
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def move(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device; work that is enqueued from now on may use it."""
        if self._stream is None:
            with self._recorder.span(Kind.COPY, "inputs"):
                return micro_batch.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        current = torch.cuda.current_stream(self._device)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor
            # torch's allocator keeps the pinned copy until the device has read it, and uses it again.
            copy = tensor.pin_memory().to(self._device, non_blocking=True)
            copy.record_stream(current)  # its memory is not given away while that stream uses it
            return copy

        copying = self._recorder.span(Kind.COPY, "inputs", lane=Lane.COPY)
        with torch.cuda.stream(self._stream), copying:
            moved = micro_batch.map(copied)
        with self._recorder.span(Kind.DATA_WAIT, "inputs"):
            current.wait_stream(self._stream)
        return moved
