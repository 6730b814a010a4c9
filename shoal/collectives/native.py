"""The native group: collectives of flat buffers, with the algorithm chosen for each."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shoal.collectives.agreement import describe_call, first_difference, first_uneven_split
from shoal.collectives.codes import ALGORITHM_NUMBERS, COLLECTIVE_NUMBERS, MOVED, Chooser, reduction_numbers
from shoal.collectives.completer import Completer
from shoal.collectives.core import GOING_ON, Call, Core
from shoal.collectives.monitored import MonitoredBarrier
from shoal.collectives.operands import address_of, bytes_of
from shoal.collectives.operation import Operation
from shoal.collectives.options import Options
from shoal.collectives.rendezvous import Formed, form_group
from shoal.collectives.work import Done, Work
from shoal.errors import CollectiveError

__all__ = ["NativeGroup"]

_NARROW = (2, 3)
"""The numbers of the 16-bit floats."""


class NativeGroup:
    """The ranks of a group, as the native core connects them.

    Args:
        core: The native core.
        store: The ranks' common store, for this group alone.
        rank: This process within the group.
        size: Ranks in the group.
        timeout: Of operations that have none of their own, and for the group to form.
        options: How it communicates.
        known: What the ranks know of each other from another group.

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
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout.total_seconds()
        self._core = core
        self.formed = form_group(core, store, rank, size, timeout, options, known)
        self._handle = self.formed.handle
        self.close = weakref.finalize(self, core.group_close, self._handle)
        self.hosts = len({member.host for member in self.formed.members})
        # Within a host there would be nothing to gain: see Work.get_future.
        self._completer = Completer() if self.hosts > 1 else None
        self.turns = self.formed.turns if self.hosts == 1 else 1
        self._chooser = Chooser(options, core.one_shot_bytes, size, self.hosts, self.turns)
        self._debug = options.debug
        self._Counts = ctypes.c_uint64 * size
        self._monitored = MonitoredBarrier()
        self._abandoned: list[tuple[int, object]] = []

    def __del__(self) -> None:
        # Not where the interpreter's end closes it: a Work may be asked something after that.
        if hasattr(self, "close"):
            self.close()
            self._core.group_free(self._handle)
            if self._completer is not None:
                self._completer.close()

    def run(self, operation: Operation, opts: Any) -> dist.Work:
        """Begins a collective.

        Args:
            operation: Which.
            opts: c10d's options of it: the time limit, the reduction, and whether it goes on while nobody
                waits for it.
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
                input_ = input_.clone()  # who reads it could find what is written already
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
            sent, received = self._Counts(*splits[0]), self._Counts(*splits[1])  # until the call has begun
            call.send_bytes, call.receive_bytes = ctypes.addressof(sent), ctypes.addressof(received)
        if stripes is not None:
            call.stripes, call.stripe_count = stripes.address, stripes.count
        if self._debug:
            self._agree(collective, call, output if input_ is None else input_, splits)
        ticket = self._core.begin(self._handle, call)
        if ticket < 0:
            self._core.check(ticket, collective)
        if ticket and not asynchronous:
            self._complete(ticket, collective, (input_, output))
            ticket = 0
        if ticket == 0:
            if finish is not None:
                finish()
            return Done(operation.result, algorithm)
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
        )

    def algorithm(self, collective: str, whole: int, slot: int, *, widening: int = 1) -> str:
        """The name of the algorithm for a collective of that size; arguments as `Chooser.choose` has them."""
        if self.size == 1:
            return "one-shot" if slot <= 4096 and collective != "all_to_all" else "direct"
        if collective == "barrier":
            return "one-shot" if self.hosts == 1 else "hierarchical"
        return self._chooser.choose(collective, whole, slot, widening)

    def _overlaps(self, operation: Operation, distance: int) -> bool:
        """Whether input and output overlap, the output `distance` behind, in more than this rank's part."""
        collective, nbytes = operation.collective, operation.nbytes
        if collective == "all_to_all":
            return True
        if collective in ("all_gather", "gather"):
            return distance < nbytes and distance != -self.rank * nbytes
        return -nbytes < distance and distance != self.rank * nbytes

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begins to send a contiguous tensor."""
        nbytes = bytes_of(tensor)
        begin = self._core.send_small if nbytes < self._core.eager_bytes else self._core.send_large
        ticket = begin(self._handle, peer, tag, address_of(tensor), nbytes, self.timeout)
        if ticket == 0:
            return Done([tensor])
        return self._message(self._core.check(ticket, f"send to rank {peer}"), f"send to rank {peer}", tensor)

    def receive(
        self, tensor: torch.Tensor, peer: int, tag: int, finish: Callable[[], None] | None
    ) -> dist.Work:
        """Begins to receive a contiguous tensor; from anyone, if `peer` is -1."""
        nbytes = bytes_of(tensor)
        name = f"receive from rank {peer}" if peer >= 0 else "receive from any rank"
        ticket = self._core.check(
            self._core.receive(self._handle, peer, tag, address_of(tensor), nbytes, self.timeout), name
        )
        return self._message(ticket, name, tensor, finish)

    def abort(self, reason: str) -> None:
        """Frees every rank that waits; the group cannot be used any more."""
        self._core.group_abort(self._handle, reason.encode())

    def monitored_barrier(self, seconds: float, wait_all_ranks: bool) -> None:
        """A barrier that says who did not come; arguments and errors as `MonitoredBarrier` has them."""
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
        )

    def _complete(self, ticket: int, name: str, operands: object) -> None:
        """Waits for an operation of which nobody else knows; arguments as `Work` has them."""
        outcome = self._core.wait(self._handle, ticket, -1.0, None)
        if outcome in GOING_ON:
            self._abandon(ticket, operands)
        else:
            self._core.forget(self._handle, ticket)
        self._core.check(outcome, name)

    def _abandon(self, ticket: int, operands: object) -> None:
        """Keeps the operands of an operation that nobody can wait for any more, until it is complete."""
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
        """Has the ranks compare what they are about to do.

        Raises:
            CollectiveError: They are about to do different things.
        """
        calls = self._gather(describe_call(call, tensor), call.timeout)
        difference = first_difference(calls, self.rank)
        if difference is None and splits is not None:
            difference = first_uneven_split(self._gather([*splits[0], *splits[1]], call.timeout))
        if difference is not None:
            rank, text = difference
            raise CollectiveError(text, rank=rank, fault="mismatch")

    def _gather(self, own: Sequence[int], timeout: float) -> list[list[int]]:
        """What every rank gives, of the same length."""
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
