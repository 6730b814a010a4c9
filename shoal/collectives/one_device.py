"""Collectives of ranks that share one device, in the memory of that device.

Every rank has a buffer there that the others have mapped (`shared_memory.py`). A collective takes place in
rounds (`rounds.py`), each of as many bytes as a buffer holds:

    put     copy the operand into the own buffer                    | all ranks meet
    fold    all-reduce: sum the own part of all buffers, in place   | all ranks meet
    take    copy, or sum for reduce-scatter, from all buffers to the result

Stripes are packed by `put` and unpacked by `take`.

A rank sums in the order of ranks, and an all-reduce's part is summed by one rank, so that all ranks get the
same bits. Sums of 16-bit floats are taken in fp32 and rounded once, as on the host.

The host waits for the device before each meeting, so that whoever has met others finds what they wrote. After
`take` a rank tells the others that it has read their buffers. It waits for theirs when it begins the next
round or closes, because only then are its own bytes free.

One thread of a rank runs these collectives, in the order of calls. They use messages only, so that they may
take place beside the group's collectives on the host.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives.agreement import describe_call, first_difference
from shoal.collectives.codes import COLLECTIVE_NUMBERS, MOVED, reduction_numbers
from shoal.collectives.core import Call
from shoal.collectives.device_copies import DeviceCopies, Event
from shoal.collectives.device_memory import DeviceMemory
from shoal.collectives.meetings import Meetings
from shoal.collectives.native import NativeGroup
from shoal.collectives.operation import Operation
from shoal.collectives.rounds import COLLECTIVES, SUMMED_AS, rounds
from shoal.collectives.shared_memory import SharedMemory
from shoal.collectives.work import Done
from shoal.errors import CollectiveError

_LIMIT = 256 << 20  # bytes of a buffer
_LEAST = 256 << 10
"""Bytes of an operand below which the host is the way: a guess at where copies cost less than meetings."""
_FAREWELL = 5.0  # seconds for the others to read the buffer of a rank that leaves
_SUMS = {hash(ReduceOp(kind)) for kind in (ReduceOp.SUM, ReduceOp.AVG)}  # a hash: see `codes.py`
_NO_DEVICE = ""
_GROW, _PUT, _FOLDED, _HAS_READ = range(4)


class OneDevice:
    """The collectives of one group in a device's memory, if all of its ranks are there.

    Args:
        native: The group.
        memory: Makes memory of the device that other ranks can map.
        limit: Largest number of bytes of a buffer, a multiple of 16.
        least: Smallest number of bytes of an operand.
    """

    def __init__(
        self, native: NativeGroup, memory: DeviceMemory, limit: int = _LIMIT, least: int = _LEAST
    ) -> None:
        self._native = native
        self._memory = memory
        self._meetings = Meetings(native)
        self._shared = SharedMemory(memory, self._meetings, native.rank, native.size, limit)
        self._least = least
        self._device: torch.device | None = None  # once it is known that all ranks are there
        self._may_be_shared = native.hosts == 1 and native.size > 1
        self._failure: CollectiveError | None = None
        self._is_read = True  # whether all ranks are known to have read this rank's buffer
        self._seconds = native.timeout
        self._call: list[int] = []

    def may_take(self, operation: Operation, opts: Any) -> bool:
        """Return whether the operation is done here if all ranks share a device; equal on all ranks."""
        is_offered = operation.collective in COLLECTIVES
        if not self._may_be_shared or not is_offered or operation.slot < self._least:
            return False
        return operation.reduces is None or (operation.reduces in SUMMED_AS and hash(opts.reduceOp) in _SUMS)

    def takes(self, device: torch.device) -> bool:
        """Return whether all ranks share this device; the first calls of all ranks meet.

        Raises:
            CollectiveError: A rank does not come in time, or is lost.
        """
        if self._failure is not None:
            raise self._failure
        if self._device is None and self._may_be_shared:
            try:
                self._may_be_shared = self._is_shared(device)
            except Exception as failure:
                self._failure = self._explained(f"finding out which ranks share {device}", failure)
                raise self._failure from failure
            if self._may_be_shared:
                self._device = device
        return device == self._device

    def _is_shared(self, device: torch.device) -> bool:
        native, seconds = self._native, self._native.timeout
        own = self._memory.identity(device) if native.direct_reads else _NO_DEVICE
        identities = self._meetings.exchange([own.encode()] * native.size, seconds)
        if own == _NO_DEVICE or len(set(identities)) > 1:
            return False
        self._shared.reserve(1, device, seconds)
        if self._shared.capacity:
            return True
        warnings.warn(
            "the ranks of a group share a GPU and cannot map each other's memory there, so that their "
            f"collectives go by way of the host: {self._shared.failure or 'another rank failed'}",
            stacklevel=2,
        )
        return False

    def run(self, operation: Operation, opts: Any, copies: DeviceCopies, marked: Event) -> Done:
        """Do a collective, and return when its result is on the device.

        Args:
            operation: The collective, for which `may_take` and `takes` are true.
            opts: c10d's options for it.
            copies: The copies of the device.
            marked: The last use of the operands before.

        Raises:
            CollectiveError: A rank calls something else, does not come in time, or is lost. The group cannot
                do this any more.
        """
        if self._failure is not None:
            raise self._failure
        seconds = opts.timeout.total_seconds()
        self._seconds = seconds if seconds > 0 else self._native.timeout
        self._call = _described(operation, opts)
        try:
            self._run(operation, opts, partial(copies.compute, after=marked))
        except Exception as failure:
            self._failure = self._explained(f"{operation.collective} on {self._device}", failure)
            raise self._failure from failure
        return Done(operation.result)

    def close(self) -> None:
        """Free the buffer once the other ranks have read it. All operations have returned."""
        if self._failure is None:
            self._seconds = min(self._seconds, _FAREWELL)
            with contextlib.suppress(CollectiveError):  # a rank that is lost reads nothing
                self._await_readers()
        self._shared.close()

    def _run(self, operation: Operation, opts: Any, compute: Callable[[Callable[[], object]], None]) -> None:
        assert self._device is not None
        shared, input_, output = self._shared, operation.input, operation.output
        if shared.can_grow_for(operation.slot):
            self._await_readers()
            self._meet(_GROW)
            shared.reserve(operation.slot, self._device, self._seconds)
        if operation.slot > shared.capacity and output is not input_ and _may_overlap(input_, output):
            assert input_ is not None
            copies: list[torch.Tensor] = []  # made on the stream that reads it
            compute(lambda: copies.append(input_.detach().clone()))
            operation = replace(operation, input=copies[0])  # the first round may overwrite the other
        is_average = operation.reduces is not None and bool(opts.reduceOp == ReduceOp.AVG)
        for each in rounds(operation, shared.buffers, self._native.rank, is_average=is_average):
            self._await_readers()
            if each.put is not None:
                compute(each.put)
            self._meet(_PUT)
            if each.fold is not None:
                compute(each.fold)
                self._meet(_FOLDED)
            if each.take is not None:
                compute(each.take)
            self._meetings.tell([_HAS_READ])
            self._is_read = False

    def _await_readers(self) -> None:
        if not self._is_read:
            self._meetings.hear(1, self._seconds)
            self._is_read = True

    def _meet(self, phase: int) -> None:
        """Return when all ranks are in this phase of the same call."""
        self._meetings.tell([*self._call, phase])
        heard = self._meetings.hear(len(self._call) + 1, self._seconds)
        calls = [heard.get(rank, self._call)[: len(self._call)] for rank in range(self._native.size)]
        difference = first_difference(calls, self._native.rank)
        if difference is not None:
            rank, text = difference
            raise CollectiveError(text, rank=rank, fault="mismatch")

    def _explained(self, doing: str, failure: Exception) -> CollectiveError:
        if isinstance(failure, CollectiveError):
            return CollectiveError(f"{doing} failed: {failure}", rank=failure.rank, fault=failure.fault)
        text = f"{doing} failed on rank {self._native.rank}: {failure}"
        self._native.abort(text)  # frees the ranks that wait for this one
        return CollectiveError(text, rank=self._native.rank, fault="aborted")


def _described(operation: Operation, opts: Any) -> list[int]:
    numbers = MOVED, 0
    if operation.reduces is not None:
        numbers = reduction_numbers(opts.reduceOp, operation.reduces)
    call = Call(COLLECTIVE_NUMBERS[operation.collective], 0, *numbers, operation.root)
    call.bytes = operation.nbytes
    if operation.stripes is not None:
        call.stripes, call.stripe_count = operation.stripes.address, operation.stripes.count
    return describe_call(call, operation.input)


def _may_overlap(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
