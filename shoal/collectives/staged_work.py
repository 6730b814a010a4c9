"""An operation of tensors on a device that goes by way of the host, with the interface of `Work`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal.collectives.background import Background
from shoal.collectives.device_copies import DeviceCopies, Event
from shoal.collectives.host_buffers import HostBuffer
from shoal.errors import CollectiveError

__all__ = ["StagedWork"]

_Base: Any = dist.Work


class StagedWork(_Base):
    """An operation under way, whose result is copied to the device when somebody waits for it.

    `wait` blocks until the host has the result, and returns once the caller's stream may use it, as with
    NCCL. A second wait, on another stream, lets that stream follow the copy.

    Args:
        copies: The copies of the device.
        result: The tensors that the operation returns.
        marked: The caller's place in its stream when it began the operation.
        landing: The contiguous tensor of the device that gets the result, the memory of the host that has it,
            and the buffer of that memory; None if this rank gets nothing.
        finish: Function to call once the result is in that tensor, such as a copy to its place.
        sources: Objects that must not be freed before the device has been read.
        completing: Thread that completes futures.
    """

    def __init__(
        self,
        copies: DeviceCopies,
        result: Sequence[Any],
        marked: Event,
        landing: tuple[torch.Tensor, torch.Tensor, HostBuffer] | None,
        finish: Callable[[], None] | None,
        sources: object,
        completing: Background,
    ) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self._copies = copies
        self._result = result
        self._marked = marked
        self._landing = landing
        self._finish = finish
        self._sources = sources
        self._completing = completing
        self._work: Any = None
        self._failure: Exception | None = None
        self._landed: Event | None = None
        self._ending = threading.Lock()

    def begin(self, read: Event | None, begin: Callable[[], dist.Work]) -> None:
        """Begin the native operation once the operands are read; a failure is raised by `wait`."""
        try:
            if read is not None:
                read.synchronize()
            self._sources = None
            self._work = begin()
        except Exception as failure:
            self._failure = failure
        finally:
            self.has_begun.set()

    @property
    def finished(self) -> float:
        """The moment at which the host had the result, as `Work.finished`; 0 before that."""
        return 0.0 if self._work is None else float(self._work.finished)

    @property
    def algorithm(self) -> str:
        """Name of the algorithm; empty before the operation has begun."""
        return "" if self._work is None else str(self._work.algorithm)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the host has the result, and let the caller's stream wait for its copy.

        Args:
            timeout: As for `Work.wait`.

        Raises:
            CollectiveError: The operation failed, or is not complete within the timeout.
        """
        if not self.has_begun.wait(timeout.total_seconds() if timeout else None):
            raise CollectiveError("the device has not reached the operation in time", fault="timeout")
        if self._failure is not None:
            raise self._failure
        self._work.wait(timeout)
        with self._ending:
            if self._landed is None:
                self._land()
            else:
                self._copies.follow(self._landed)
        return True

    def _land(self) -> None:
        if self._landing is not None:
            tensor, host, buffer = self._landing
            buffer.reader = self._copies.write(tensor, host, self._marked)
        if self._finish is not None:
            self._finish()
        self._landed = self._copies.mark()
        self._landing = self._finish = None

    def is_completed(self) -> bool:
        """Return whether the result is on the device, or the operation has failed."""
        if not self.has_begun.is_set():
            return False
        if self._failure is not None:
            return True
        if not self._work.is_completed():
            return False
        if self._work.exception() is not None:
            return True
        if self._landed is None:
            self.wait()
        return self._landed is not None and self._landed.query()

    def is_success(self) -> bool:
        """Return whether it is complete and has not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return what went wrong, once it is complete; None if nothing did."""
        if self._failure is not None or self._work is None:
            return self._failure
        failure: Exception | None = self._work.exception()
        return failure

    def result(self) -> list[Any]:
        """Return the tensors that it gives, once the caller's stream may use them."""
        self.wait()
        return list(self._result)

    def source_rank(self) -> int:
        """Return the rank that sent the received message."""
        return int(self._work.source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors, which another thread completes."""
        base: torch.futures.Future = torch.futures.Future(devices=self._devices() or None)
        # Raise a failure within a callback, as `Work.get_future` does.
        future = base.then(lambda _: self.result())
        self._completing.run(partial(base.set_result, None))
        return future

    def _devices(self) -> list[int | str | torch.device]:
        """Return the devices of the result, which a future must know to order streams."""
        return list({tensor.device for tensor in _tensors_in(self._result) if not tensor.is_cpu})


def _tensors_in(result: Sequence[Any]) -> list[torch.Tensor]:
    return [
        tensor
        for each in result
        for tensor in ([each] if isinstance(each, torch.Tensor) else _tensors_in(each))
    ]
