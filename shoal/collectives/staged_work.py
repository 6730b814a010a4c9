"""An operation of tensors on a device that goes by way of the host, with the interface of `Work`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from shoal.collectives.background import Background
from shoal.collectives.device_copies import DeviceCopies, Event
from shoal.collectives.host_buffers import HostBuffer
from shoal.errors import CollectiveError

_Base: Any = dist.Work


@dataclass(frozen=True, slots=True)
class Landing:
    """The way of a result from the host to the device.

    Attributes:
        tensor: The contiguous tensor of the device that gets it.
        host: The memory of the host that has it; None if the tensor has it already.
        buffer: The buffer of that memory.
        finish: Function to call once the tensor has it, such as a copy to another place.
    """

    tensor: torch.Tensor
    host: torch.Tensor | None
    buffer: HostBuffer | None
    finish: Callable[[], None] | None


class StagedWork(_Base):
    """An operation under way, whose result is copied to the device when somebody waits for it.

    `wait` blocks until the host has the result, and returns once the caller's stream may use it, as with
    NCCL. A second wait, on another stream, lets that stream follow the copy.

    Args:
        copies: The copies of the device.
        result: The tensors that the operation returns.
        marked: The caller's place in its stream when it began the operation.
        landing: The way of the result to the device; None if this rank gets nothing.
        source: The operand, which must not be freed before it has been read; None if there is none.
        completing: Thread that completes futures.
    """

    def __init__(
        self,
        copies: DeviceCopies,
        result: Sequence[Any],
        marked: Event,
        landing: Landing | None,
        source: torch.Tensor | None,
        completing: Background,
    ) -> None:
        super().__init__()
        self._has_begun = threading.Event()
        self._copies = copies
        self._result = result
        self.marked = marked
        self.landing = landing
        self._source = source
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
            self._source = None
            self._work = begin()
        except Exception as failure:
            self._failure = failure
        finally:
            self._has_begun.set()

    def fail(self, failure: Exception) -> None:
        """Let `wait` raise a failure; the operation does not begin."""
        self._failure = failure
        self._source = None
        self._has_begun.set()

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
        if not self._has_begun.wait(timeout.total_seconds() if timeout else None):
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
        landing, self.landing = self.landing, None
        if landing is not None:
            if landing.host is None:
                self._copies.keep(landing.tensor)
            else:
                assert landing.buffer is not None
                landing.buffer.reader = self._copies.write(landing.tensor, landing.host, self.marked)
            if landing.finish is not None:
                landing.finish()
        self._landed = self._copies.mark()

    def is_completed(self) -> bool:
        """Return whether the result is on the device, or the operation has failed."""
        if not self._has_begun.is_set():
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
        return list({tensor.device for tensor in tree_leaves(list(self._result)) if not tensor.is_cpu})
