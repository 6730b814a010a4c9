"""Copies between a device's memory and the host's, in the order of the device's streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in the work of a stream."""

    def query(self) -> bool:
        """Return whether the stream is past it."""

    def synchronize(self) -> None:
        """Return when the stream is past it."""


class DeviceCopies:
    """The copies of one device.

    Reads run on a stream of their own, beside the caller's computation. Writes run on the caller's stream, as
    the caller uses the result next. Whoever reads keeps both tensors until the event that `read` returns: the
    allocator does not know of the other stream.

    Args:
        device: The device.
        streams: Its streams and events, with the interface of `torch.cuda`.
        copy: Function that puts a copy from its second to its first argument into the current stream.
        launch: Function that puts other work into the current stream.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Any = torch.cuda,
        copy: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
        launch: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self.device = device
        self._streams = streams
        self._copy = _copy if copy is None else copy
        self._launch = _launch if launch is None else launch
        self._reads = streams.Stream(device=device)

    def mark(self) -> Event:
        """Return the present place in the caller's stream."""
        event: Event = self._streams.current_stream(self.device).record_event()
        return event

    def follow(self, event: Event) -> None:
        """Let the caller's stream wait for an event."""
        self._streams.current_stream(self.device).wait_event(event)

    def read(self, host: torch.Tensor, tensor: torch.Tensor, after: Event) -> Event:
        """Begin to copy from the device once `after` has passed; return the event of its end.

        Args:
            host: Contiguous memory of the host, with as many elements as `tensor`.
            tensor: A contiguous tensor of the device.
            after: The last use of `tensor` before.
        """
        self._reads.wait_event(after)
        with self._streams.stream(self._reads):
            self._copy(host, tensor.detach().view(-1))
        return self._end_of_reads()

    def compute(self, kernel: Callable[[], object], after: Event) -> None:
        """Run work on the stream of reads once `after` has passed, and return when it is done."""
        self._reads.wait_event(after)
        with self._streams.stream(self._reads):
            self._launch(partial(_undifferentiated, kernel))
        self._end_of_reads().synchronize()

    def launch(self, kernel: Callable[[], object]) -> None:
        """Put other work into the caller's stream."""
        self._launch(kernel)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory, which another stream allocated, until the caller's stream is past here."""
        if not tensor.is_cpu:
            tensor.record_stream(self._streams.current_stream(self.device))

    def _end_of_reads(self) -> Event:
        # A thread waits for it: it must leave its core to the ranks meanwhile.
        done = self._streams.Event(blocking=True)
        done.record(self._reads)
        end: Event = done
        return end

    def write(self, tensor: torch.Tensor, host: torch.Tensor, after: Event) -> Event:
        """Put a copy to the device into the caller's stream, once `after` has passed; return its event.

        Arguments are those of `read`.
        """
        self.follow(after)
        self._copy(tensor.data.view(-1), host)  # not counted as a change, as with other backends
        self.keep(tensor)  # the caller may wait on another stream than it allocated the tensor on
        return self.mark()


def _copy(to: torch.Tensor, from_: torch.Tensor) -> None:
    to.copy_(from_, non_blocking=True)


def _launch(kernel: Callable[[], object]) -> None:
    kernel()


def _undifferentiated(kernel: Callable[[], object]) -> None:
    with torch.inference_mode():  # in which tensors of either mode may be written
        kernel()
