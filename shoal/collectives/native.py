"""The native group: runs collectives of flat buffers, and chooses the algorithm for each."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shoal.collectives.checks import address_of, bytes_of
from shoal.collectives.ctypes_core import GOING_ON, Call, Core
from shoal.collectives.enums import ALGORITHM_NUMBERS, COLLECTIVE_NUMBERS, MOVED, Chooser, reduction_numbers
from shoal.collectives.hang_watch import HangWatch
from shoal.collectives.operation import Operation, describe_call, first_difference, first_uneven_split
from shoal.collectives.options import Options
from shoal.collectives.rendezvous import Formed, form_group
from shoal.collectives.work import Background, Done, Work
from shoal.errors import CollectiveError

_TAG = -1
"""Tag of the barrier's messages; tags of `torch.distributed` are not negative."""

_PASSED = -1


class Messages(Protocol):
    """A group that can send messages, such as a `NativeGroup`."""

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a contiguous tensor."""

    def receive(
        self, tensor: torch.Tensor, peer: int, tag: int, finish: Callable[[], None] | None
    ) -> dist.Work:
        """Begin to receive a contiguous tensor."""


class MonitoredBarrier:
    """A barrier in which rank 0 receives a token from every rank, then tells every rank who is missing.

    If the barrier fails, the group goes on. A receive that got nothing stays for the next barrier, because a
    late rank still sends its token.
    """

    def __init__(self) -> None:
        self._receives: dict[int, tuple[dist.Work, torch.Tensor]] = {}

    def __call__(self, group: Messages, seconds: float, wait_all_ranks: bool) -> None:
        """Return when all ranks have called it.

        Args:
            group: The group, the same in every call.
            seconds: Time limit for all ranks to come.
            wait_all_ranks: Whether rank 0 waits for all ranks and then names every missing one, instead of
                only the first.

        Raises:
            CollectiveError: Not all ranks came in time.
        """
        if group.rank == 0:
            self._collect(group, seconds, wait_all_ranks)
        else:
            self._report(group, seconds)

    def _collect(self, group: Messages, seconds: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + seconds
        others = range(1, group.size)
        for rank in others:
            self._expect(group, rank)
        missing: dict[int, CollectiveError] = {}
        for rank in others:
            left = deadline - time.monotonic()
            if left <= 0 and not missing:
                raise CollectiveError(
                    f"Rank 0 timed out in monitoredBarrier after {seconds:g} s", rank=rank, fault="timeout"
                )
            try:
                self._take(rank, max(left, 1e-3))
            except CollectiveError as failure:
                missing[rank] = failure
                if not wait_all_ranks:
                    break
        answer = next(iter(missing), _PASSED)
        for rank in others:
            if self._has_come(rank):
                _send(group, rank, answer)
        if missing:
            names = ("Ranks " if wait_all_ranks else "Rank ") + ", ".join(map(str, missing))
            first, cause = next(iter(missing.items()))
            raise CollectiveError(
                f"{names} failed to pass monitoredBarrier in {seconds:g} s", rank=first, fault=cause.fault
            ) from cause

    def _report(self, group: Messages, seconds: float) -> None:
        self._expect(group, 0)
        _send(group, 0, group.rank)
        met_trouble = (
            f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0"
        )
        try:
            # Wait a little longer than rank 0, because its answer says more.
            missing = self._take(0, seconds + 1)
        except CollectiveError as failure:
            raise CollectiveError(f"{met_trouble}: {failure}", rank=0, fault=failure.fault) from failure
        if missing != _PASSED:
            raise CollectiveError(
                f"{met_trouble}: rank {missing} did not come", rank=missing, fault="timeout"
            )

    def _expect(self, group: Messages, rank: int) -> None:
        if rank not in self._receives:
            token = torch.empty(1, dtype=torch.int64)
            self._receives[rank] = group.receive(token, rank, _TAG, None), token

    def _has_come(self, rank: int) -> bool:
        if rank in self._receives and self._receives[rank][0].is_success():
            del self._receives[rank]
        return rank not in self._receives

    def _take(self, rank: int, seconds: float) -> int:
        work, token = self._receives[rank]
        work.wait(timedelta(seconds=seconds))
        del self._receives[rank]
        return int(token)


def _send(group: Messages, rank: int, number: int) -> None:
    # No wait: a few bytes leave at once.
    group.send(torch.tensor([number]), rank, _TAG)


_NARROW = (2, 3)
"""Numbers of the types that are 16-bit floats."""


class NativeGroup:
    """A group whose ranks the native core connects.

    Args:
        core: The native core.
        store: The ranks' common store, for this group alone.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Time limit for the group to form, and for operations that have none of their own.
        options: How the group communicates.
        known: Facts that the ranks know about each other from another group.
        watch: Notes the calls, and explains failures; None: nobody does.
        global_ranks: Global ranks of the group; None for the default group.

    Raises:
        CollectiveError: The ranks did not all come, or cannot reach each other.
    """

    def __init__(
        self,
        core: Core,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        options: Options,
        known: Formed | None = None,
        watch: HangWatch | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout.total_seconds()
        self._core = core
        self.formed = form_group(core, store, rank, size, timeout, options, known)
        self._handle = self.formed.handle
        self.close = weakref.finalize(self, core.group_close, self._handle)
        self.hosts = len({member.host for member in self.formed.members})
        # Within a host a thread would gain nothing: see Work.get_future.
        self._completer = Background() if self.hosts > 1 else None
        self.turns = self.formed.turns if self.hosts == 1 else 1
        self._chooser = Chooser(options, core.one_shot_bytes, size, self.hosts, self.turns)
        self.direct_reads = options.direct_reads
        self._debug = options.debug
        self._Counts = ctypes.c_uint64 * size
        self._monitored = MonitoredBarrier()
        self._abandoned: list[tuple[int, object]] = []
        self._watch = None
        if watch is not None:
            if global_ranks is None:
                own = self.formed.members[rank].host
                here = [each.pid if each.host == own else None for each in self.formed.members]
                watch.start(rank, here, _checking(self), self.formed.name)
            self._watch = watch.group(range(size) if global_ranks is None else global_ranks)

    def __del__(self) -> None:
        # Not at the interpreter's end: a Work may be used after that.
        if hasattr(self, "close"):
            self.close()
            self._core.group_free(self._handle)

    def run(self, operation: Operation, opts: Any) -> dist.Work:
        """Begin a collective.

        Args:
            operation: The collective and its operands.
            opts: c10d's options for it: the time limit, the reduction, and whether it runs in the
                background.
        """
        if self._abandoned:
            self._forget_abandoned()
        collective, input_, output = operation.collective, operation.input, operation.output
        splits, stripes, finish = operation.splits, operation.stripes, operation.finish
        given = taken = address_of(input_) if input_ is not None else 0
        if output is not input_:
            taken = address_of(output) if output is not None else 0
            reach = operation.whole if splits is None else sum(splits[1])
            if -reach < taken - given < operation.whole and self._overlaps(operation, taken - given):
                assert input_ is not None
                input_ = input_.clone()  # another rank could read elements that are already overwritten
                given = input_.data_ptr()
        dtype, reduction = MOVED, 0
        if operation.reduces is not None:
            dtype, reduction = reduction_numbers(opts.reduceOp, operation.reduces)
        asynchronous = getattr(opts, "asyncOp", True)
        timeout = opts.timeout.total_seconds()
        algorithm = "direct"
        if stripes is None:
            widening = 2 if dtype in _NARROW else 1
            algorithm = self.algorithm(collective, operation.whole, operation.slot, widening=widening)
        call = Call(
            COLLECTIVE_NUMBERS[collective],
            ALGORITHM_NUMBERS[algorithm],
            dtype,
            reduction,
            operation.root,
            asynchronous,
            given,
            taken,
            operation.nbytes,
            None,
            None,
            timeout if timeout > 0 else self.timeout,
        )
        if splits is not None:
            sent, received = self._Counts(*splits[0]), self._Counts(*splits[1])  # kept until the call begins
            call.send_bytes, call.receive_bytes = ctypes.addressof(sent), ctypes.addressof(received)
        if stripes is not None:
            call.stripes, call.stripe_count = stripes.address, stripes.count
        token = 0
        if self._watch is not None:
            moved = output if input_ is None else input_
            of = None if moved is None else moved.dtype
            token = self._watch.begin(collective, of, operation.nbytes, operation.root)
        if self._debug:
            self._agree(collective, call, output if input_ is None else input_, splits)
        ticket = self._core.begin(self._handle, call)
        if ticket < 0:
            self._check(ticket, collective)
        if ticket and not asynchronous:
            self._complete(ticket, collective, (input_, output))
            ticket = 0
        if ticket == 0:
            if finish is not None:
                finish()
            if self._watch is not None:
                self._watch.end(token)
            return Done(operation.result, algorithm)
        if self._watch is not None:
            finish = self._watch.ended_after(token, finish)
        return Work(
            self._core,
            self._handle,
            ticket,
            collective,
            result=operation.result,
            operands=(input_, output),
            abandon=self._abandon,
            algorithm=algorithm,
            finish=finish,
            completer=self._completer,
            explain=None if self._watch is None else self._watch.explain,
        )

    def algorithm(self, collective: str, whole: int, slot: int, *, widening: int = 1) -> str:
        """Return the name of the algorithm for a collective; the arguments are those of `Chooser.choose`."""
        if self.size == 1:
            return "one-shot" if slot <= 4096 and collective != "all_to_all" else "direct"
        if collective == "barrier":
            return "one-shot" if self.hosts == 1 else "hierarchical"
        return self._chooser.choose(collective, whole, slot, widening)

    def _overlaps(self, operation: Operation, distance: int) -> bool:
        """Return whether input and output overlap in more than this rank's part.

        Args:
            operation: The collective and its operands.
            distance: Bytes from the beginning of the input to that of the output.
        """
        collective, nbytes = operation.collective, operation.nbytes
        if collective == "all_to_all":
            return True
        if collective in ("all_gather", "gather"):
            return distance < nbytes and distance != -self.rank * nbytes
        return -nbytes < distance and distance != self.rank * nbytes

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a contiguous tensor."""
        nbytes = bytes_of(tensor)
        begin = self._core.send_small if nbytes < self._core.eager_bytes else self._core.send_large
        ticket = begin(self._handle, peer, tag, address_of(tensor), nbytes, self.timeout)
        if ticket == 0:
            return Done([tensor])
        name = f"send to rank {peer}"
        if self._watch is None:
            return self._message(self._core.check(ticket, name), name, tensor)
        token = self._watch.begin_message("send", tensor.dtype, nbytes, peer)
        return self._message(self._check(ticket, name), name, tensor, self._watch.ended_after(token, None))

    def receive(
        self, tensor: torch.Tensor, peer: int, tag: int, finish: Callable[[], None] | None
    ) -> dist.Work:
        """Begin to receive a contiguous tensor; from any rank if `peer` is -1."""
        nbytes = bytes_of(tensor)
        name = f"receive from rank {peer}" if peer >= 0 else "receive from any rank"
        ticket = self._core.check(
            self._core.receive(self._handle, peer, tag, address_of(tensor), nbytes, self.timeout), name
        )
        if self._watch is not None:
            token = self._watch.begin_message("receive", tensor.dtype, nbytes, peer)
            finish = self._watch.ended_after(token, finish)
        return self._message(ticket, name, tensor, finish)

    def abort(self, reason: str) -> None:
        """Free every rank that waits; the group cannot be used any more."""
        self._core.group_abort(self._handle, reason.encode())

    def failure(self) -> CollectiveError | None:
        """Return why the group has failed; None if it has not."""
        outcome = self._core.group_check(self._handle)
        return self._core.failure("the group", -outcome) if outcome < 0 else None

    def monitored_barrier(self, seconds: float, wait_all_ranks: bool) -> None:
        """Wait for all ranks; arguments and errors are those of `MonitoredBarrier`."""
        self._monitored(self, seconds, wait_all_ranks)

    def _message(
        self, ticket: int, name: str, tensor: torch.Tensor, finish: Callable[[], None] | None = None
    ) -> dist.Work:
        return Work(
            self._core,
            self._handle,
            ticket,
            name,
            result=[tensor],
            operands=tensor,
            abandon=self._abandon,
            finish=finish,
            completer=self._completer,
            explain=None if self._watch is None else self._watch.explain,
        )

    def _complete(self, ticket: int, name: str, operands: object) -> None:
        """Wait for an operation that has no Work; the arguments are those of `Work`."""
        outcome = self._core.wait(self._handle, ticket, -1.0, None)
        if outcome in GOING_ON:
            self._abandon(ticket, operands)
        else:
            self._core.forget(self._handle, ticket)
        self._check(outcome, name)

    def _check(self, outcome: int, name: str) -> int:
        """Return an outcome unless it is an error, which is raised with its cause if that can be found."""
        try:
            return self._core.check(outcome, name)
        except CollectiveError as failure:
            if self._watch is None:
                raise
            raise self._watch.explain(failure) from None

    def _abandon(self, ticket: int, operands: object) -> None:
        """Keep the operands of an operation whose Work was dropped, until it is complete."""
        self._abandoned.append((ticket, operands))

    def _forget_abandoned(self) -> None:
        abandoned, self._abandoned = self._abandoned, []
        for ticket, operands in abandoned:
            if self._core.test(self._handle, ticket):
                self._core.forget(self._handle, ticket)
            else:
                self._abandoned.append((ticket, operands))

    def _agree(
        self,
        collective: str,
        call: Call,
        tensor: torch.Tensor | None,
        splits: tuple[Sequence[int], Sequence[int]] | None,
    ) -> None:
        """Compare this call with those of the other ranks.

        Raises:
            CollectiveError: The calls differ.
        """
        calls = self._gather(describe_call(call, tensor), call.timeout)
        difference = first_difference(calls, self.rank)
        if difference is None and splits is not None:
            difference = first_uneven_split(self._gather([*splits[0], *splits[1]], call.timeout))
        if difference is not None:
            rank, text = difference
            raise CollectiveError(text, rank=rank, fault="mismatch")

    def _gather(self, own: Sequence[int], timeout: float) -> list[list[int]]:
        """Return the numbers that every rank gives; all ranks give equally many."""
        told = torch.tensor(own)
        everyone = torch.empty(self.size, len(own), dtype=torch.int64)
        nbytes = bytes_of(told)
        call = Call(
            COLLECTIVE_NUMBERS["all_gather"],
            ALGORITHM_NUMBERS[self.algorithm("all_gather", nbytes * self.size, nbytes)],
            MOVED,
            0,
            0,
            False,
            told.data_ptr(),
            everyone.data_ptr(),
            nbytes,
            None,
            None,
            timeout,
        )
        name = "comparing what the ranks call"
        ticket = self._core.check(self._core.begin(self._handle, call), name)
        if ticket:
            self._complete(ticket, name, (told, everyone))
        return everyone.tolist()  # type: ignore[no-any-return]


def _checking(group: NativeGroup) -> Callable[[], CollectiveError | None]:
    """Return a function that returns why a group has failed, and that does not keep the group alive."""
    alive = weakref.ref(group)

    def check() -> CollectiveError | None:
        found = alive()
        return None if found is None or not found.close.alive else found.failure()

    return check
