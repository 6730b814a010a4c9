"""Operations of tensors on a device, by way of the host or in the device's memory.

By way of the host, the operands are copied there, the native group does the operation, and its result is
copied back.

    caller's thread      mark | begin to read the operands          ... wait: write the result | go on
    background thread         | wait for the read | begin the native operation

Ranks may share a device, which NCCL refuses. The caller never waits for the device when it begins an
operation. One thread begins the native collectives, in the order of the calls, because all ranks of a group
must begin them in one order; a collective of tensors on the host waits until those before it have begun.
Another thread begins to send messages. A receive needs nothing of the device and begins at once.

If all ranks of the group are on one device, that has the way of `shared_device.py` for most collectives.
Ranks find out at the first such collective: the thread that begins them waits there for the other ranks. Then
these collectives have a thread and an order of their own, so that neither the host's collectives nor messages
wait for them.

Until its read is complete, an operand is held by the operation. A host buffer is lent to the native
operation, and is not used again before the operation has let go of it and the device has read it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from shoal.collectives.checks import require_stripes
from shoal.collectives.device_memory import CudaMemory
from shoal.collectives.enums import described, reduction_numbers, refusal
from shoal.collectives.host_buffers import DeviceCopies, Event, HostBuffer, HostBuffers
from shoal.collectives.native import NativeGroup
from shoal.collectives.operation import Operation
from shoal.collectives.shared_device import OneDevice
from shoal.collectives.work import Background
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


_FAREWELL = 5.0
"""Seconds that a rank that leaves the group gives the others to come to operations that it has called."""


def require_no_other(configured: str) -> None:
    """Refuse tensors on GPUs in a group that was asked to have another backend for them.

    Torch gives a whole group to a backend that is written in Python, and leaves out the others in silence.

    Args:
        configured: The backends that were asked for, such as "cpu:shoal,cuda:nccl".

    Raises:
        CollectiveError: One of them is for GPUs, and is not "shoal".
    """
    asked = dict(pair.split(":") for pair in configured.split(","))
    if asked.get("cuda", "shoal") not in ("shoal", asked.get("cpu")):
        raise refusal(
            f"a tensor on a GPU was given to a group of {configured}, which torch formed with shoal alone",
            possible='"shoal" for all devices, "cpu:gloo,cuda:nccl", or two groups',
            change="form the group with one of these",
        )


@dataclass(frozen=True, slots=True)
class _Settings:
    """The options of c10d that the native group reads, which the caller may change after the call."""

    reduceOp: Any  # noqa: N815
    timeout: timedelta
    asyncOp: bool  # noqa: N815

    @classmethod
    def of(cls, opts: Any) -> _Settings:
        return cls(getattr(opts, "reduceOp", None), opts.timeout, getattr(opts, "asyncOp", True))


@final
class Staging:
    """The operations of one group on tensors of devices, with the interface of its `NativeGroup`.

    Args:
        native: The group.
        is_on_device: Whether a tensor is on a device.
        copies_of: Returns the copies of a device.
        buffers: Memory of the host.
        one_device: The group's collectives in the memory of one device.
    """

    def __init__(
        self,
        native: NativeGroup,
        is_on_device: Callable[[torch.Tensor], bool] = lambda tensor: not tensor.is_cpu,
        copies_of: Callable[[torch.device], DeviceCopies] = DeviceCopies,
        buffers: HostBuffers | None = None,
        one_device: OneDevice | None = None,
    ) -> None:
        self._native = native
        self._is_on_device = is_on_device
        self._copies_of = copies_of
        self._copies: dict[torch.device, DeviceCopies] = {}
        self._buffers = HostBuffers(locks_pages=True) if buffers is None else buffers
        self._one_device = OneDevice(native, CudaMemory()) if one_device is None else one_device
        self._collectives = Background()  # begins them
        self._on_device = Background()  # does those in the device's memory
        self._messages = Background()  # begins to send them
        self._completing = Background()  # of futures: their callbacks wait for operations

    def takes(self, one: torch.Tensor | None, other: torch.Tensor | None = None) -> bool:
        """Return whether one of these operands is on a device."""
        is_on_device = self._is_on_device
        return (one is not None and is_on_device(one)) or (other is not None and is_on_device(other))

    def settle(self) -> None:
        """Return when all collectives have begun."""
        self._collectives.settle()

    def settle_messages(self) -> None:
        """Return when all messages have begun."""
        self._messages.settle()

    def close(self) -> None:
        """End the threads, once all operations have begun, and those in the device's memory have ended."""
        self._messages.settle()
        deadline = time.monotonic() + _FAREWELL
        for background in (self._collectives, self._on_device):
            if not background.settle(max(deadline - time.monotonic(), 0.0)):
                # The others will never come, and wait for this rank as long as it waits for them.
                self._native.abort("the group was left before all ranks began an operation")
                background.settle()
        self._one_device.close()
        for background in (self._messages, self._collectives, self._on_device, self._completing):
            background.close()

    def run(self, operation: Operation, opts: Any) -> dist.Work:
        """Begin a collective; arguments and errors are those of `NativeGroup.run`."""
        if operation.reduces is not None:
            reduction_numbers(opts.reduceOp, operation.reduces)  # refused now, and not in the background
        if operation.stripes is not None:
            assert operation.input is not None
            require_stripes(operation.input, operation.stripes, self._native.size)
        copies = self._copies_for(operation.input, operation.output)
        work = StagedWork(copies, operation.result, copies.mark(), None, operation.input, self._completing)
        settings = _Settings.of(opts)
        if self._one_device.may_take(operation, settings):
            begin: Callable[[], None] = partial(
                self._begin_where_ranks_are, work, copies, operation, settings
            )
        else:
            begin = self._read(work, copies, operation, settings)
        self._begin(self._collectives, begin, is_async=settings.asyncOp)
        return work

    def _read(
        self, work: StagedWork, copies: DeviceCopies, operation: Operation, settings: _Settings
    ) -> Callable[[], None]:
        """Begin to read the operands; return the function that begins the operation on the host."""
        input_, output = operation.input, operation.output
        given = taken = read = buffer = None
        if input_ is not None:
            given, buffer = self._buffers.take(input_.numel(), input_.dtype)
            read = copies.read(given, input_, work.marked)
        if output is not None:
            if output is input_:
                taken = given
            else:
                taken, buffer = self._buffers.take(output.numel(), output.dtype)
            assert taken is not None
            work.landing = Landing(output, taken, buffer, operation.finish)
        on_host = replace(operation, input=given, output=taken, result=[], finish=None)
        return partial(work.begin, read, partial(self._native.run, on_host, settings))

    def _begin_where_ranks_are(
        self, work: StagedWork, copies: DeviceCopies, operation: Operation, settings: _Settings
    ) -> None:
        """Begin a collective in the device's memory if all ranks are there, or else on the host."""
        try:
            if not self._one_device.takes(copies.device):
                self._read(work, copies, operation, settings)()
                return
        except Exception as failure:
            work.fail(failure)
            return
        assert operation.output is not None
        work.landing = Landing(operation.output, None, None, operation.finish)
        run = partial(self._one_device.run, operation, settings, copies, work.marked)
        self._begin(self._on_device, partial(work.begin, None, run), is_async=settings.asyncOp)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a contiguous tensor."""
        copies = self._copies_for(tensor)
        marked = copies.mark()
        given, _ = self._buffers.take(tensor.numel(), tensor.dtype)
        read = copies.read(given, tensor, marked)
        work = StagedWork(copies, [tensor], marked, None, tensor, self._completing)
        begin = partial(work.begin, read, partial(self._native.send, given, peer, tag))
        self._begin(self._messages, begin, is_async=True)
        return work

    def receive(
        self, tensor: torch.Tensor, peer: int, tag: int, finish: Callable[[], None] | None
    ) -> dist.Work:
        """Begin to receive a contiguous tensor; from any rank if `peer` is -1."""
        copies = self._copies_for(tensor)
        taken, buffer = self._buffers.take(tensor.numel(), tensor.dtype)
        landing = Landing(tensor, taken, buffer, finish)
        work = StagedWork(copies, [tensor], copies.mark(), landing, None, self._completing)
        work.begin(None, partial(self._native.receive, taken, peer, tag, None))
        return work

    def _begin(self, thread: Background, begin: Callable[[], None], *, is_async: bool) -> None:
        if is_async:
            thread.run(begin)
        else:
            thread.settle()
            begin()

    def _copies_for(self, *operands: torch.Tensor | None) -> DeviceCopies:
        tensors = [tensor for tensor in operands if tensor is not None]
        device = tensors[0].device
        for tensor in tensors:
            if tensor.device != device or not self._is_on_device(tensor):
                raise refusal(
                    f"{described(tensors[0])} on {device} was given with {described(tensor)} on "
                    f"{tensor.device}",
                    possible="an input and an output on one device",
                    change=f"move one of them, for example with .to({str(device)!r})",
                )
        if device not in self._copies:
            self._copies[device] = self._copies_of(device)
        return self._copies[device]
