"""Collectives of ranks that share one device, in the memory of that device.

Every rank has a buffer there that the others have mapped. A collective takes place in
rounds, each of as many bytes as a buffer holds:

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
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives.ctypes_core import Call
from shoal.collectives.device_memory import DeviceMemory
from shoal.collectives.enums import COLLECTIVE_NUMBERS, MOVED, reduction_numbers
from shoal.collectives.host_buffers import DeviceCopies, Event
from shoal.collectives.native import NativeGroup
from shoal.collectives.operation import Operation, describe_call, first_difference
from shoal.collectives.work import Done
from shoal.errors import CollectiveError

_TAG = -2
"""Tag of these messages: those of users are not negative, and a monitored barrier has -1."""


class Meetings:
    """The messages of one group. What a rank tells is heard in the order in which it was told.

    Args:
        native: The group.
    """

    def __init__(self, native: NativeGroup) -> None:
        self._native = native
        self._others = [rank for rank in range(native.size) if rank != native.rank]

    def tell(self, numbers: Sequence[int]) -> None:
        """Tell all other ranks some numbers, without a wait."""
        told = torch.tensor(numbers, dtype=torch.int64)
        for rank in self._others:
            self._native.send(told, rank, _TAG)

    def hear(self, count: int, seconds: float) -> dict[int, list[int]]:
        """Return the `count` numbers that each other rank has told.

        Raises:
            CollectiveError: A rank does not tell them in time, or is lost.
        """
        return {
            rank: heard.tolist()
            for rank, heard in self._receive(dict.fromkeys(self._others, count), torch.int64, seconds).items()
        }

    def exchange(self, given: Sequence[bytes], seconds: float) -> list[bytes]:
        """Give each rank one of the texts; return those that the ranks gave to this one, and its own.

        Raises:
            CollectiveError: A rank does not come in time, or is lost.
        """
        self.tell([len(each) for each in given])
        lengths = {rank: told[self._native.rank] for rank, told in self.hear(len(given), seconds).items()}
        sent = [self._native.send(_as_tensor(given[rank]), rank, _TAG) for rank in self._others]
        texts = list(given)
        for rank, text in self._receive(lengths, torch.uint8, seconds).items():
            texts[rank] = bytes(text.tolist())
        for work in sent:
            work.wait()
        return texts

    def _receive(self, counts: dict[int, int], dtype: torch.dtype, seconds: float) -> dict[int, torch.Tensor]:
        deadline = time.monotonic() + seconds
        heard = {rank: torch.empty(count, dtype=dtype) for rank, count in counts.items()}
        works = [self._native.receive(each, rank, _TAG, None) for rank, each in heard.items()]
        for work in works:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
        return heard


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


_SMALLEST = 1 << 20  # bytes


class SharedMemory:
    """The buffers of a group. They grow, on all ranks at once, and are never larger than the limit.

    A rank's buffer is its own: torch keeps it until the last rank that mapped it has let go of it.

    Args:
        memory: Makes memory that other ranks can map.
        meetings: The messages of the group.
        rank: This rank.
        size: Number of ranks in the group.
        limit: Largest number of bytes of a buffer.
    """

    def __init__(self, memory: DeviceMemory, meetings: Meetings, rank: int, size: int, limit: int) -> None:
        self._limit = limit
        self.buffers: list[torch.Tensor] = []
        self.failure: Exception | None = None
        self._memory = memory
        self._meetings = meetings
        self._rank = rank
        self._size = size

    @property
    def capacity(self) -> int:
        """Bytes of each buffer; 0 before the first."""
        return self.buffers[self._rank].numel() if self.buffers else 0

    def can_grow_for(self, nbytes: int) -> bool:
        """Return whether the buffers are too small for `nbytes`, and below the limit; equal on all ranks."""
        return self.capacity < min(nbytes, self._limit)

    def reserve(self, nbytes: int, device: torch.device, seconds: float) -> None:
        """Let the buffers have `nbytes`, or the limit; all ranks call it, and none uses a buffer meanwhile.

        If a rank cannot have or map larger ones, all keep what they have, and that is their limit.

        Raises:
            CollectiveError: A rank does not come in time, or is lost.
        """
        larger = self._map(min(max(_SMALLEST, 1 << (nbytes - 1).bit_length()), self._limit), device, seconds)
        self._meetings.tell([larger is not None])
        heard = self._meetings.hear(1, seconds)
        if larger is not None and all(told == [True] for told in heard.values()):
            self.buffers = larger
        else:
            self._limit = self.capacity

    def _map(self, nbytes: int, device: torch.device, seconds: float) -> list[torch.Tensor] | None:
        """Return new buffers of all ranks; None if this rank cannot make its own, or map one."""
        exports = [b""] * self._size
        try:
            own = self._memory.empty(nbytes, device)
            exports = [b"" if rank == self._rank else self._memory.export(own) for rank in range(self._size)]
        except Exception as failure:
            self.failure = failure
        exported = self._meetings.exchange(exports, seconds)
        try:
            return [
                own if rank == self._rank else self._memory.open(exported[rank]) for rank in range(self._size)
            ]
        except Exception as failure:
            self.failure = self.failure or failure
            return None

    def close(self) -> None:
        """Let go of the buffers."""
        self.buffers = []


SUMMED_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""The types that can be summed, and the type in which they are."""

Kernel = Callable[[], object]
Buffers = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Round:
    """Work of the device between meetings of all ranks.

    Attributes:
        put: Copies the operand to the own buffer; None for a rank that gives nothing.
        fold: Sums a part of all buffers into the own one; None if nobody does.
        take: Copies from all buffers to the result, or sums; None for a rank that gets nothing.
    """

    put: Kernel | None
    fold: Kernel | None
    take: Kernel | None


def rounds(operation: Operation, buffers: Buffers, rank: int, *, is_average: bool) -> Iterator[Round]:
    """Yield the rounds of a collective.

    Args:
        operation: The collective, one of `COLLECTIVES`; of stripes, one that gathers or scatters.
        buffers: Each rank's buffer: uint8, of one size, which is a multiple of the operand's elements.
        rank: This rank.
        is_average: Whether sums are divided by the number of ranks.
    """
    of_kind = COLLECTIVES if operation.stripes is None else _OF_STRIPES
    return of_kind[operation.collective](operation, buffers, rank, is_average)


def _all_reduce(operation: Operation, buffers: Buffers, rank: int, is_average: bool) -> Iterator[Round]:
    assert operation.input is not None
    assert operation.output is not None
    typed = [buffer.view(operation.input.dtype) for buffer in buffers]
    capacity = typed[rank].numel()
    sources, results = _flat(operation.input).split(capacity), _flat(operation.output).split(capacity)
    for source, result in zip(sources, results, strict=True):
        whole = [each[: source.numel()] for each in typed]
        share = -(-source.numel() // len(buffers))
        own = slice(rank * share, (rank + 1) * share)
        sums = [whole[index][index * share : (index + 1) * share] for index in range(len(buffers))]
        yield Round(
            partial(whole[rank].copy_, source),
            partial(_sum, [each[own] for each in whole], sums[rank], is_average),
            partial(torch.cat, sums, out=result),
        )


def _reduce_scatter(operation: Operation, buffers: Buffers, rank: int, is_average: bool) -> Iterator[Round]:
    assert operation.input is not None
    assert operation.output is not None
    size, result = len(buffers), _flat(operation.output)
    typed = [buffer.view(operation.input.dtype) for buffer in buffers]
    width = typed[rank].numel() // size
    sources = _flat(operation.input).view(size, result.numel()).split(width, dim=1)
    for source, part in zip(sources, result.split(width), strict=True):
        parts = [each[: source.numel()].view(source.shape) for each in typed]
        own = [each[rank] for each in parts]
        yield Round(partial(parts[rank].copy_, source), None, partial(_sum, own, part, is_average))


def _all_gather(operation: Operation, buffers: Buffers, rank: int, is_average: bool) -> Iterator[Round]:
    assert operation.input is not None
    assert operation.output is not None
    source = _bytes(operation.input)
    capacity = buffers[rank].numel()
    results = _bytes(operation.output).view(len(buffers), source.numel()).split(capacity, dim=1)
    for part, result in zip(source.split(capacity), results, strict=True):
        parts = [each[: part.numel()] for each in buffers]
        yield Round(partial(parts[rank].copy_, part), None, partial(_copy_all, parts, result))


def _broadcast(operation: Operation, buffers: Buffers, rank: int, is_average: bool) -> Iterator[Round]:
    assert operation.input is not None
    buffer = buffers[operation.root]
    for part in _bytes(operation.input).split(buffer.numel()):
        given = buffer[: part.numel()]
        if rank == operation.root:
            yield Round(partial(given.copy_, part), None, None)
        else:
            yield Round(None, None, partial(part.copy_, given))


class _Piece(NamedTuple):
    """Elements of a stripe, equally many of each rank's part: rank i's begin at `first + i * part`."""

    first: int
    part: int
    elements: int

    def of(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        begin = self.first + rank * self.part
        return buffer[begin : begin + self.elements]


def _pieces(operation: Operation, width: int) -> Iterator[list[_Piece]]:
    """Yield the pieces of all stripes, as many for each round as have `width` elements of a rank together."""
    assert operation.input is not None
    assert operation.stripes is not None
    element, pieces, room = operation.input.element_size(), list[_Piece](), width
    for first, part in operation.stripes.positions:
        at, end = first // element, (first + part) // element
        while at < end:
            pieces.append(_Piece(at, part // element, min(end - at, room)))
            at += pieces[-1].elements
            room -= pieces[-1].elements
            if room == 0:
                yield pieces
                pieces, room = [], width
    if pieces:
        yield pieces


def _all_gather_stripes(
    operation: Operation, buffers: Buffers, rank: int, is_average: bool
) -> Iterator[Round]:
    """Put the own pieces one after another, and take those of the others: few kernels for many tensors."""
    assert operation.input is not None
    buffer = _flat(operation.input)
    typed = [each.view(buffer.dtype) for each in buffers]
    others = [other for other in range(len(buffers)) if other != rank]
    for pieces in _pieces(operation, typed[rank].numel()):
        counts = [each.elements for each in pieces]
        packed = [each[: sum(counts)].split(counts) for each in typed]
        yield Round(
            partial(torch._foreach_copy_, packed[rank], [each.of(buffer, rank) for each in pieces]),
            None,
            partial(
                torch._foreach_copy_,
                [each.of(buffer, other) for other in others for each in pieces],
                [part for other in others for part in packed[other]],
            ),
        )


def _reduce_scatter_stripes(
    operation: Operation, buffers: Buffers, rank: int, is_average: bool
) -> Iterator[Round]:
    """Put all pieces, rank by rank, and take the sum of the own ones."""
    assert operation.input is not None
    buffer, size = _flat(operation.input), len(buffers)
    typed = [each.view(buffer.dtype) for each in buffers]
    for pieces in _pieces(operation, typed[rank].numel() // size):
        counts = [each.elements for each in pieces]
        width = sum(counts)
        rows = [each[: size * width].view(size, width) for each in typed]
        yield Round(
            partial(
                torch._foreach_copy_,
                [part for row in rows[rank] for part in row.split(counts)],
                [each.of(buffer, other) for other in range(size) for each in pieces],
            ),
            None,
            partial(
                _sum_apart,
                [each[rank] for each in rows],
                rank,
                [each.of(buffer, rank) for each in pieces],
                is_average,
            ),
        )


_OF_STRIPES = {"all_gather": _all_gather_stripes, "reduce_scatter": _reduce_scatter_stripes}

COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.view(-1)  # what is written is not counted as a change, as with other backends


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _flat(tensor).view(torch.uint8)


def _sum(parts: Sequence[torch.Tensor], to: torch.Tensor, is_average: bool) -> None:
    """Write the sum of the parts, in their order, to a tensor that may be one of them."""
    total = parts[0].to(SUMMED_AS[to.dtype]) + parts[1]
    for part in parts[2:]:
        total += part
    if is_average:
        total /= len(parts)
    to.copy_(total)


def _sum_apart(parts: Sequence[torch.Tensor], rank: int, to: list[torch.Tensor], is_average: bool) -> None:
    """Copy the sum of the parts to tensors that together are as long; nobody else reads this rank's part."""
    _sum(parts, parts[rank], is_average)
    torch._foreach_copy_(to, parts[rank].split([each.numel() for each in to]))


def _copy_all(parts: Sequence[torch.Tensor], to: torch.Tensor) -> None:
    for part, row in zip(parts, to, strict=True):
        row.copy_(part)


_LIMIT = 256 << 20  # bytes of a buffer
_LEAST = 256 << 10
"""Bytes of an operand below which the host is the way: a guess at where copies cost less than meetings."""
_FAREWELL = 5.0  # seconds for the others to read the buffer of a rank that leaves
_SUMS = {hash(ReduceOp(kind)) for kind in (ReduceOp.SUM, ReduceOp.AVG)}  # a hash: see `enums.py`
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
