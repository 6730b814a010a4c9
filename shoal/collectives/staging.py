"""Operations of tensors on a device, by way of the host.

The operands are copied to the host, the native group does the operation there, and its result is copied back.

    caller's thread      mark | begin to read the operands          ... wait: write the result | go on
    background thread         | wait for the read | begin the native operation

Ranks may share a device, which NCCL refuses. The caller never waits for the device when it begins an
operation. One thread begins the native operations, in the order of the calls, because all ranks of a group
must begin them in one order; an operation of tensors on the host waits until those before it have begun. A
receive needs nothing of the device and begins at once.

Until its read is complete, an operand is held by the operation. A host buffer is lent to the native
operation, and is not used again before the operation has let go of it and the device has read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from shoal.collectives.background import Background
from shoal.collectives.codes import reduction_numbers
from shoal.collectives.device_copies import DeviceCopies, Event
from shoal.collectives.host_buffers import HostBuffers
from shoal.collectives.native import NativeGroup
from shoal.collectives.operation import Operation
from shoal.collectives.refusal import described, refusal
from shoal.collectives.staged_work import Landing, StagedWork

__all__ = ["Staging", "require_no_other"]


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
    """

    def __init__(
        self,
        native: NativeGroup,
        is_on_device: Callable[[torch.Tensor], bool] = lambda tensor: not tensor.is_cpu,
        copies_of: Callable[[torch.device], DeviceCopies] = DeviceCopies,
        buffers: HostBuffers | None = None,
    ) -> None:
        self._native = native
        self._is_on_device = is_on_device
        self._copies_of = copies_of
        self._copies: dict[torch.device, DeviceCopies] = {}
        self._buffers = HostBuffers(locks_pages=True) if buffers is None else buffers
        self._beginning = Background()
        self._completing = Background()  # of futures: their callbacks wait for operations
        self._last: threading.Event | None = None  # set once all that the thread was given has begun

    def takes(self, one: torch.Tensor | None, other: torch.Tensor | None = None) -> bool:
        """Return whether an operation of these operands goes by way of the host."""
        is_on_device = self._is_on_device
        return (one is not None and is_on_device(one)) or (other is not None and is_on_device(other))

    def settle(self) -> None:
        """Return when all operations have begun."""
        last = self._last
        if last is not None and not last.is_set():
            last.wait()

    def close(self) -> None:
        """End the threads, once all operations have begun."""
        self.settle()
        self._beginning.close()
        self._completing.close()

    def run(self, operation: Operation, opts: Any) -> dist.Work:
        """Begin a collective; arguments and errors are those of `NativeGroup.run`."""
        input_, output = operation.input, operation.output
        if operation.reduces is not None:
            reduction_numbers(opts.reduceOp, operation.reduces)  # refused now, and not in the background
        copies = self._copies_for(input_, output)
        marked = copies.mark()
        given = taken = read = landing = buffer = None
        if input_ is not None:
            given, buffer = self._buffers.take(input_.numel(), input_.dtype)
            read = copies.read(given, input_, marked)
        if output is not None:
            if output is input_:
                taken = given
            else:
                taken, buffer = self._buffers.take(output.numel(), output.dtype)
            assert taken is not None
            assert buffer is not None
            landing = Landing(output, taken, buffer, operation.finish)
        work = StagedWork(copies, operation.result, marked, landing, input_, self._completing)
        settings = _Settings.of(opts)
        on_host = replace(operation, input=given, output=taken, result=[], finish=None)
        self._begin(work, read, partial(self._native.run, on_host, settings), settings.asyncOp)
        return work

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a contiguous tensor."""
        copies = self._copies_for(tensor)
        marked = copies.mark()
        given, _ = self._buffers.take(tensor.numel(), tensor.dtype)
        read = copies.read(given, tensor, marked)
        work = StagedWork(copies, [tensor], marked, None, tensor, self._completing)
        self._begin(work, read, partial(self._native.send, given, peer, tag))
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

    def _begin(
        self, work: StagedWork, read: Event | None, begin: Callable[[], dist.Work], is_async: bool = True
    ) -> None:
        if is_async:
            self._last = work.has_begun
            self._beginning.run(partial(work.begin, read, begin))
        else:
            self.settle()
            work.begin(read, begin)

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
