"""What the code of shoal/parallel does, for pictures: it runs here with axes of no other process.

Each rank runs by itself, one after the other. What it sends is kept, and delivered in the next pass, until
every rank has got what the others send: what a rank does then is what it does among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.parallel.communication import Pending

__all__ = ["Event", "WatchedAxis", "watch"]

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default)

_MOST_PASSES = 20  # one more than collectives that wait for one another


class Event(NamedTuple):
    """Something that a rank did.

    Attributes:
        kind: "start" or "wait" of a collective, "multiply", or what the program itself notes.
        name: The collective: "shift", "all-to-all", "all-gather", "reduce-scatter", "all-reduce".
        tensors: Copies of what is sent or computed with.
        rows: Of an all-to-all, how many go to each rank.
    """

    kind: str
    name: str = ""
    tensors: tuple[Tensor, ...] = ()
    rows: tuple[int, ...] = ()


def watch(program: Callable[[Any], None], ranks: int) -> list[list[Event]]:
    """What each rank did in a program that communicates over one axis of so many ranks.

    Args:
        program: Gets a `WatchedAxis`, which stands for an `Axis`. It does the same each time.
        ranks: How many there are.
    """
    sent: list[list[Event]] = []
    for _ in range(_MOST_PASSES):
        axes = [WatchedAxis(ranks, index, sent) for index in range(ranks)]
        for axis in axes:
            with _Products(axis):
                program(axis)
        before, sent = sent, [[event for event in axis.events if event.kind == "start"] for axis in axes]
        if before and all(map(_same, before, sent)):
            return [axis.events for axis in axes]
    raise RuntimeError("the program does not do the same each time")


class WatchedAxis:
    """In place of an `Axis`: keeps what happens, and delivers what was sent in the pass before.

    Args:
        size: Number of ranks.
        index: Which of them this is.
        sent: By rank, the collectives of the pass before; none in the first.
    """

    name = "watched"

    def __init__(self, size: int, index: int, sent: list[list[Event]]) -> None:
        self.size, self.index, self.members = size, index, tuple(range(size))
        self.events: list[Event] = []
        self._sent = sent
        self._turn = 0

    def note(self, kind: str, *tensors: Tensor) -> None:
        """Adds an event."""
        self.events.append(Event(kind, "", tuple(each.detach().clone() for each in tensors)))

    def shift(self, received: Tensor, sent: Tensor, name: str) -> Pending:
        """See `Axis`."""
        return self._start("shift", sent, received, lambda all_sent: all_sent[self.index - 1])

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        name: str,
        *,
        received_rows: Sequence[int] | None = None,
        sent_rows: Sequence[int] | None = None,
    ) -> Pending:
        """See `Axis`."""
        rows = tuple(sent_rows or [len(sent) // self.size] * self.size)
        turn = self._turn

        def arriving(all_sent: list[Tensor]) -> Tensor:
            given = [events[turn].rows for events in self._sent]
            parts = [each.split(rows)[self.index] for each, rows in zip(all_sent, given, strict=True)]
            return torch.cat(parts)

        return self._start("all-to-all", sent, received, arriving, rows)

    def all_gather(self, full: Tensor, name: str) -> Pending:
        """See `Axis`."""
        return self._start("all-gather", self._part(full), full, torch.cat)

    def reduce_scatter(self, shard: Tensor, full: Tensor, name: str) -> Pending:
        """See `Axis`."""
        return self._start(
            "reduce-scatter", full, shard, lambda all_sent: self._part(torch.stack(all_sent).sum(0))
        )

    def all_reduce(self, tensor: Tensor, name: str) -> Pending:
        """See `Axis`."""
        return self._start("all-reduce", tensor, tensor, lambda all_sent: torch.stack(all_sent).sum(0))

    def _part(self, full: Tensor) -> Tensor:
        return full.chunk(self.size)[self.index]

    def _start(
        self,
        name: str,
        sent: Tensor,
        received: Tensor,
        arriving: Callable[[list[Tensor]], Any],
        rows: tuple[int, ...] = (),
    ) -> Pending:
        self.events.append(Event("start", name, (sent.clone(),), rows))
        arrived = None
        if self._turn < min(map(len, self._sent), default=0):
            arrived = arriving([events[self._turn].tensors[0] for events in self._sent])
        if arrived is not None and arrived.shape == received.shape:
            received.copy_(arrived)
        else:
            received.zero_()  # until what comes is what will come
        self._turn += 1
        return _Waited(self.events, name)


class _Waited:
    def __init__(self, events: list[Event], name: str) -> None:
        self._events = events
        self._name = name

    def wait(self) -> None:
        """Returns at once: it is there."""
        self._events.append(Event("wait", self._name))


class _Products(TorchDispatchMode):
    """Adds to an axis's events the matrix products that are computed meanwhile."""

    def __init__(self, axis: WatchedAxis) -> None:
        super().__init__()
        self._axis = axis

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in _PRODUCTS:
            self._axis.note("multiply", *(each for each in args if isinstance(each, Tensor)))
        return operator(*args, **(kwargs or {}))


def _same(one: list[Event], other: list[Event]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a.rows == b.rows and torch.equal(*a.tensors, *b.tensors) for a, b in pairs
    )
