"""An axis of the mesh as one rank sees it: a group, and the collectives over it, recorded.

A collective starts at once and returns a `Pending`. Its span lasts until the collective is complete; waiting
for it is a span of its own on the compute lane. An axis of one rank communicates nothing and records nothing.

NCCL communicates on a stream of its own, and its `wait` makes the current stream wait, not the host. There a
collective is recorded on a further stream, which does nothing else: it waits for the tensors, has the event
at the span's start, waits for the collective, and has the event at its end. No other stream waits for it.

The first uses of NCCL's groups, in one order on all ranks.

NCCL makes a communicator with its group, and connects the ranks later: for collectives when one of them first
runs an algorithm (`NCCL_RUNTIME_CONNECT`), and for messages when two ranks first send to each other. Then a
rank's host waits for the others. If one rank uses group A first and another one group B, each waits for the
other forever. So each group is used as soon as it is made: all ranks make all groups in one order.

Collectives of a bucket: several tensors in one buffer, each cut into one part per rank.

If the parts of a rank are not contiguous, one message for each tensor would cost more than the bytes. Between
CPUs of one host the backend "shoal" moves all of them in one operation; NCCL does so in one launch. Elsewhere
the parts are packed into a second buffer, moved, and unpacked.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, final

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.collectives import Done, ProcessGroup, StagedWork, Stripes, Work, empty
from shoal.errors import CommunicationError
from shoal.record import DeviceRecorder, NullRecorder, OpenSpan, Recorder, SpanBeside
from shoal.spec.timeline import Kind, Lane, Purpose

_world: weakref.ref[dist.ProcessGroup] | None = None
"""The default group when a mesh was made last."""

# torch 2.13 renames the two collectives of equal parts; before it only the older names exist.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Pending(Protocol):
    """A collective that was started; who started it waits for it."""

    def wait(self) -> None:
        """Return once the result may be used, by the current stream if it is on a device."""


class Then:
    """A collective, and the work to do once it is complete.

    Args:
        pending: The collective.
        finish: Called once, when it has been waited for.
    """

    def __init__(self, pending: Pending, finish: Callable[[], object]) -> None:
        self._pending = pending
        self._finish = finish

    def wait(self) -> None:
        """Return once the result may be used."""
        self._pending.wait()
        self._finish()


class _Complete:
    """The `Pending` of an axis of one rank: there is nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class _Started:
    """A collective that runs, the span that it will end, and the work to do after it."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        span: OpenSpan,
        recorder: Recorder,
        name: str,
        purpose: Purpose,
        *,
        on_cpu: bool,
        after: Callable[[], object] | None,
        operands: object,
    ) -> None:
        self._works = works
        self._operands = operands
        self._span = span
        self._recorder = recorder
        self._name = name
        self._purpose = purpose
        self._after = after
        # The backend "shoal" knows when an operation was complete; other backends need a future.
        self._timed = [work for work in works if isinstance(work, (Done, StagedWork, Work))]
        if on_cpu and not self._timed and not isinstance(recorder, NullRecorder):
            self._running = list(works)
            for work in works:
                work.get_future().add_done_callback(self._one_is_complete)

    def wait(self) -> None:
        """Block until the collective is complete; raise its error if it failed."""
        waiting = self._recorder.span(Kind.WAIT, self._name, purpose=self._purpose)
        with waiting, _as_communication_error(self._name):
            for work in self._works:
                work.wait()
        self._operands = None
        if self._timed:
            self._span.close(max(work.finished for work in self._timed), self._timed[0].algorithm)
        else:
            self._span.close()
        if self._after is not None:
            self._after()

    def _one_is_complete(self, future: object) -> None:
        self._running.pop()
        if not self._running:
            self._span.close(time.perf_counter())


def new_buffer(elements: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor `[elements]` to communicate from, with undefined content.

    Between CPUs it lies in memory that the ranks of a host share, if the backend is "shoal".
    """
    if device.type == "cpu" and dist.is_initialized() and dist.get_backend() == "shoal":
        return empty(elements, dtype=dtype)
    return torch.empty(elements, dtype=dtype, device=device)


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str:
    """Return the name of the backend that a group uses for tensors on this type of device; "" for none."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return next((backend for device, _, backend in pairs if device == device_type), "")


def _forget_former_meshes() -> None:
    """Empty torch's cache of results on equal meshes, if the default group was made anew since the last call.

    The cached meshes have the groups of the former default group, which are gone.
    """
    global _world
    world = dist.group.WORLD
    assert world is not None
    if _world is not None and _world() is not world:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # a slow import, seldom needed

        _clear_sharding_prop_cache()
    _world = weakref.ref(world)


class Axis:
    """One axis of the mesh: the ranks that differ along this axis only, and the collectives over them.

    Args:
        name: The axis, as the Timeline names it.
        members: Global ranks of the group, in mesh order.
        rank: This process's global rank.
        group: Its process group; None if the axis has one rank.
        recorder: Recorder of spans.
        purpose: Purpose of its communication, as recorded in the Timeline.

    Attributes:
        channels: By the index of a rank, a group of this rank and that one, for messages between them; the
            axis's own group for ranks that are not here. NCCL passes the messages of a group on one after the
            other, also those of different ranks.
    """

    def __init__(
        self,
        name: str,
        members: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        recorder: Recorder,
        purpose: Purpose = Purpose.CONTROL,
    ) -> None:
        self.name = name
        self.members = members
        self.size = len(members)
        self.index = members.index(rank)
        self.group = group
        self._recorder = recorder
        self._purpose = purpose
        self._is_gloo = self.size > 1 and dist.get_backend(group) == "gloo"
        self._is_nccl = self.size > 1 and backend_of(group, "cuda") == "nccl"
        self._mesh: DeviceMesh | None = None
        self.channels: dict[int, dist.ProcessGroup] = {}

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return its process group, also if that is the default group; the axis has more than one rank."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return group

    def unrecorded(self) -> Axis:
        """Return the same axis without spans."""
        axis = copy.copy(self)
        axis._recorder = NullRecorder()
        return axis

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return the axis as a mesh of one dim, for DTensors over it; the axis has more than one rank."""
        if self._mesh is None:
            _forget_former_meshes()
            self._mesh = DeviceMesh.from_group(self.process_group, device_type, mesh_dim_names=(self.name,))
        return self._mesh

    def all_reduce(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sum `tensor` over the axis, in place."""
        return self._start(f"all_reduce:{name}", tensor, (dist.all_reduce, tensor))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> Pending:
        """Sum `full` [size x n] over the axis; rank i of the axis gets the i-th n elements in `shard` [n].

        `shard` may be this rank's own part of `full`.
        """
        name = f"reduce_scatter:{name}"
        if not self._is_gloo:
            return self._start(name, full, (_reduce_scatter, shard, full))
        # An all-to-all and a local sum take two thirds of the time of gloo's own (docs/log.md).
        received = torch.empty_like(full)
        return self._start(
            name,
            full,
            (dist.all_to_all_single, received, full),
            after=lambda: torch.sum(received.view(self.size, -1), dim=0, out=shard),
        )

    def all_gather(self, full: torch.Tensor, name: str) -> Pending:
        """Copy the i-th n elements of `full` [size x n] from rank i to every rank, in place."""
        name = f"all_gather:{name}"
        parts = full.chunk(self.size)
        if not self._is_gloo:
            return self._start(name, full, (_all_gather, full, parts[self.index]))
        # A broadcast of each part takes three quarters of the time of gloo's own, and no memory.
        broadcasts = [(dist.broadcast, *pair) for pair in zip(parts, self.members, strict=True)]
        return self._start(name, full, *broadcasts)

    def broadcast(self, tensor: torch.Tensor, name: str, source: int = 0) -> Pending:
        """Copy `tensor` from one rank of the axis, by default the first, to all."""
        return self._start(f"broadcast:{name}", tensor, (dist.broadcast, tensor, self.members[source]))

    def send(self, sent: torch.Tensor, target: int, name: str) -> Pending:
        """Send a contiguous `sent` to one rank of the axis, which receives it under the same name."""
        return self._message(dist.isend, sent, target, (self.index, target), name)

    def receive(self, received: torch.Tensor, source: int, name: str) -> Pending:
        """Receive into a contiguous `received` the tensor that a rank of the axis sends."""
        return self._message(dist.irecv, received, source, (source, self.index), name)

    def begin(self, name: str, counted: torch.Tensor, call: Callable[[], Any]) -> Pending:
        """Start a collective that the caller defines.

        Args:
            name: Name of the span in the Timeline.
            counted: The tensor whose bytes the Timeline counts.
            call: Starts the collective over `process_group`, and returns its work.
        """

        def start(*, group: dist.ProcessGroup | None, async_op: bool) -> Any:
            return call()

        return self._start(name, counted, (start,), has_future=False)

    def _message(
        self,
        transfer: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int,
        ends: tuple[int, int],
        name: str,
    ) -> Pending:
        def begin(*, group: dist.ProcessGroup | None, async_op: bool) -> Any:
            return transfer(tensor, self.members[peer], self.channels.get(peer, group))

        group = tuple(self.members[index] for index in ends)
        return self._start(name, tensor, (begin,), group=group, has_future=False)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        name: str,
        *,
        received_rows: Sequence[int] | None = None,
        sent_rows: Sequence[int] | None = None,
    ) -> Pending:
        """Send the i-th rows of `sent` to rank i of the axis; receive its rows into `received`.

        Args:
            received: `[rows, ...]`, the parts in the order of the axis.
            sent: `[rows, ...]`, the parts in the order of the axis.
            name: Name of the span in the Timeline.
            received_rows: Number of rows that come from each rank; equal parts if None.
            sent_rows: Number of rows that go to each rank; equal parts if None.
        """
        if self.size == 1:
            received.copy_(sent)
        return self._start(
            f"all_to_all:{name}",
            sent,
            (dist.all_to_all_single, received, sent, _listed(received_rows), _listed(sent_rows)),
        )

    def shift(self, received: torch.Tensor, sent: torch.Tensor, name: str) -> Pending:
        """Send `sent` to the next rank of the axis, and receive the previous rank's into `received`."""
        if self.size == 1:
            received.copy_(sent)
            return _Complete()
        after = self.members[(self.index + 1) % self.size]
        before = self.members[(self.index - 1) % self.size]

        def exchange(*, group: dist.ProcessGroup | None, async_op: bool) -> list[dist.Work]:
            pair = [
                dist.P2POp(dist.isend, sent, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
            works: list[dist.Work] = dist.batch_isend_irecv(pair)
            return works

        return self._start(f"shift:{name}", sent, (exchange,), has_future=False)

    def _start(
        self,
        name: str,
        counted: torch.Tensor,
        *calls: tuple[Any, ...],
        after: Callable[[], object] | None = None,
        group: tuple[int, ...] | None = None,
        has_future: bool = True,
    ) -> Pending:
        """Start these operations, recorded as one collective.

        Args:
            name: Name of the span in the Timeline.
            counted: The tensor whose bytes the Timeline counts.
            calls: Functions of `torch.distributed`, each with its arguments.
            after: Work that the waiting caller does when they are complete.
            group: The global ranks that take part, if not all of the axis.
            has_future: Whether gloo reports their completion by a future.
        """
        if self.size == 1:
            return _Complete()
        ranks = self.members if group is None else group
        open_span: Callable[..., OpenSpan] = self._recorder.open
        if self._is_nccl and isinstance(self._recorder, DeviceRecorder):
            # Ranks of one communicator, in any order: NCCL has a stream for each.
            open_span = partial(self._recorder.open_beside, f"{self._purpose} {self.name} {sorted(ranks)}")
        span = open_span(
            Kind.COLLECTIVE,
            name,
            lane=Lane.COMMUNICATION,
            bytes=counted.numel() * counted.element_size(),
            group=ranks,
            purpose=self._purpose,
        )
        with _as_communication_error(name):
            begun = [call(*arguments, group=self.group, async_op=True) for call, *arguments in calls]
        works = [work for each in begun for work in (each if isinstance(each, list) else [each])]
        operands = None
        if isinstance(span, SpanBeside):
            span.close_after(work.synchronize for work in works)
            # A work holds its tensors until a stream waits for it: now only the stream beside does.
            operands = calls
        on_cpu = has_future and counted.device.type == "cpu"
        return _Started(
            works,
            span,
            self._recorder,
            name,
            self._purpose,
            on_cpu=on_cpu,
            after=after,
            operands=operands,
        )


def _listed(rows: Sequence[int] | None) -> list[int] | None:
    return None if rows is None else list(rows)


@contextmanager
def _as_communication_error(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{name} failed: {error}") from error


_SIZES = (1, 64 << 10, 4 << 20)
"""Elements of a number, a tensor and a bucket: NCCL chooses the algorithm by size, collective and machine."""


@final
class Connections:
    """Connect the groups that this rank is in; all ranks of a group call the same method for it.

    Args:
        rank: This process's global rank.
        device: The device of the groups' tensors; None if the groups need not be connected.
    """

    def __init__(self, rank: int, device: torch.device | None) -> None:
        self._rank = rank
        self._device = device

    def for_collectives(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        """Do each collective of an axis with few elements and with many.

        A broadcast always takes the ring, a small sum often the tree, and a large one what switches offer.
        """
        axis = self._axis(members, group)
        if axis is None:
            return
        for elements in _SIZES:
            whole = torch.zeros(-(-elements // axis.size) * axis.size, device=self._device)
            axis.broadcast(whole, "first use").wait()
            axis.all_reduce(whole, "first use").wait()
            axis.all_gather(whole, "first use").wait()
            axis.reduce_scatter(whole.chunk(axis.size)[axis.index], whole, "first use").wait()
        self._finish()

    def for_all_pairs(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        """Send something from each rank to each, for shifts and for all-to-alls."""
        axis = self._axis(members, group)
        if axis is None:
            return
        sent = torch.zeros(axis.size, device=self._device)
        axis.all_to_all(torch.empty_like(sent), sent, "first use").wait()
        self._finish()

    def for_messages(self, members: tuple[int, int], group: dist.ProcessGroup | None) -> None:
        """Send something each way between two ranks."""
        axis = self._axis(members, group)
        if axis is None:
            return
        sent, received = torch.zeros(2, 1, device=self._device)
        for sender in (0, 1):  # one after the other: NCCL runs the messages of a group in the order of calls
            if axis.index == sender:
                axis.send(sent, 1 - sender, "first use").wait()
            else:
                axis.receive(received, sender, "first use").wait()
        self._finish()

    def _axis(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> Axis | None:
        if self._device is None or self._rank not in members or len(members) == 1:
            return None
        return Axis("first use", members, self._rank, group, NullRecorder())

    def _finish(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Striped:
    """The collectives of one layout over one axis, all in place.

    Args:
        axis: The ranks; rank i has the i-th part of each tensor.
        stripes: For each tensor, its first element in the buffer and the number of elements of one part.
    """

    def __init__(self, axis: Axis, stripes: Sequence[tuple[int, int]]) -> None:
        self._axis = axis
        self._stripes = stripes
        self._part_elements = sum(part for _, part in stripes)
        self._native: dict[int, Stripes] = {}  # key: bytes of an element

    def all_gather(self, buffer: torch.Tensor, name: str) -> Pending:
        """Give every rank all ranks' parts of the tensors in `buffer`."""
        if self._axis.size == 1 or not self._stripes:
            return self._axis.all_gather(buffer[:0], name)
        if self._is_native:
            stripes = self._native_stripes(buffer)

            group: Any = self._axis.process_group
            return self._axis.begin(
                f"all_gather:{name}", buffer, lambda: group.all_gather_stripes(buffer, stripes)
            )
        if self._coalesces(buffer):
            return self._axis.begin(f"all_gather:{name}", buffer, self._coalesced(buffer, is_gather=True))
        packed = self._packed(buffer)
        self._copy(buffer, packed, [self._axis.index], is_packing=True)
        others = [index for index in range(self._axis.size) if index != self._axis.index]
        return Then(
            self._axis.all_gather(packed, name),
            lambda: self._copy(buffer, packed, others, is_packing=False),
        )

    def reduce_scatter(self, buffer: torch.Tensor, name: str) -> Pending:
        """Sum the tensors in `buffer` over the axis; this rank gets its parts, the others are undefined."""
        if self._axis.size == 1 or not self._stripes:
            return self._axis.reduce_scatter(buffer[:0], buffer[:0], name)
        if self._is_native:
            stripes = self._native_stripes(buffer)

            group: Any = self._axis.process_group
            return self._axis.begin(
                f"reduce_scatter:{name}", buffer, lambda: group.reduce_scatter_stripes(buffer, stripes)
            )
        if self._coalesces(buffer):
            return self._axis.begin(
                f"reduce_scatter:{name}", buffer, self._coalesced(buffer, is_gather=False)
            )
        packed = self._packed(buffer)
        index = self._axis.index
        self._copy(buffer, packed, range(self._axis.size), is_packing=True)
        return Then(
            self._axis.reduce_scatter(packed.chunk(self._axis.size)[index], packed, name),
            lambda: self._copy(buffer, packed, [index], is_packing=False),
        )

    @property
    def _is_native(self) -> bool:
        group = self._axis.process_group
        return isinstance(group, ProcessGroup) and group.hosts == 1

    def _coalesces(self, buffer: torch.Tensor) -> bool:
        return buffer.is_cuda and backend_of(self._axis.process_group, "cuda") == "nccl"

    def _native_stripes(self, buffer: torch.Tensor) -> Stripes:
        size = buffer.element_size()
        if size not in self._native:
            self._native[size] = Stripes([(first * size, part * size) for first, part in self._stripes])
        return self._native[size]

    def _coalesced(self, buffer: torch.Tensor, *, is_gather: bool) -> Callable[[], Any]:
        """Return a function that moves all tensors in one launch, as a coalesced collective of c10d."""
        wholes = [buffer[first : first + part * self._axis.size] for first, part in self._stripes]
        parts = [whole.chunk(self._axis.size)[self._axis.index] for whole in wholes]

        group: Any = self._axis.process_group
        if is_gather:
            return lambda: group.allgather_into_tensor_coalesced(wholes, parts)
        return lambda: group.reduce_scatter_tensor_coalesced(parts, wholes)

    def _packed(self, buffer: torch.Tensor) -> torch.Tensor:
        elements = self._part_elements * self._axis.size
        return new_buffer(elements, dtype=buffer.dtype, device=buffer.device)

    def _copy(
        self, buffer: torch.Tensor, packed: torch.Tensor, ranks: Sequence[int], *, is_packing: bool
    ) -> None:
        """Copy the parts of some ranks between the buffer and a packed buffer, where they are contiguous."""
        apart, together = [], []
        for index in ranks:
            at = index * self._part_elements
            for first, part in self._stripes:
                apart.append(buffer[first + index * part : first + (index + 1) * part])
                together.append(packed[at : at + part])
                at += part
        if is_packing:
            torch._foreach_copy_(together, apart)
        else:
            torch._foreach_copy_(apart, together)
