"""Operations of tensors on a device, by way of the host or in the device's memory.

By way of the host, the operands are copied there, the native group does the operation, and its result is
copied back.

    caller's thread      mark | begin to read the operands          ... wait: write the result | go on
    background thread         | wait for the read | begin the native operation

Ranks may share a device, which NCCL refuses. The caller never waits for the device when it begins an
operation. One thread begins the native collectives, in the order of the calls, because all ranks of a group
must begin them in one order; a collective of tensors on the host waits until those before it have begun.
Another thread begins to send messages. A receive needs nothing of the device and begins at once.

If all ranks of the group are on one device, that has the way of `one_device.py` for most collectives. Ranks
find out at the first such collective: the thread that begins them waits there for the other ranks. Then these
collectives have a thread and an order of their own, so that neither the host's collectives nor messages wait
for them.

Until its read is complete, an operand is held by the operation. A host buffer is lent to the native
operation, and is not used again before the operation has let go of it and the device has read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from shoal.collectives.background import Background
from shoal.collectives.checks import require_stripes
from shoal.collectives.codes import reduction_numbers
from shoal.collectives.device_copies import DeviceCopies
from shoal.collectives.device_memory import CudaMemory
from shoal.collectives.host_buffers import HostBuffers
from shoal.collectives.native import NativeGroup
from shoal.collectives.one_device import OneDevice
from shoal.collectives.operation import Operation
from shoal.collectives.refusal import described, refusal
from shoal.collectives.staged_work import Landing, StagedWork

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
