"""Operations that have begun, with the interface of `torch.distributed.Work`."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from shoal.collectives.ctypes_core import GOING_ON, Core
from shoal.collectives.thread_device import on_callers_device, take_device
from shoal.errors import CollectiveError

_Given = SimpleQueue[tuple[Callable[[], object], threading.Event] | None]


class Background:
    """A thread that runs functions one after the other, in the order in which they were given.

    The functions must not raise. The thread starts with the first of them, on the GPU of the thread that
    gives it, and ends with this object.
    """

    def __init__(self) -> None:
        self._given: _Given = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: threading.Event | None = None  # set once all functions so far have returned

    def run(self, function: Callable[[], object]) -> None:
        """Run the function, after those that were given before."""
        if self._thread is None:
            # A daemon: a process that ends without waiting for a function does not wait for this thread.
            work = on_callers_device(_serve)
            self._thread = threading.Thread(target=work, args=(self._given,), name="shoal", daemon=True)
            self._thread.start()
        self._last = threading.Event()
        self._given.put((function, self._last))

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until all functions that it was given have returned; return whether they have in this time."""
        last = self._last
        if last is not None and not last.is_set():
            return last.wait(seconds)
        return True

    def close(self) -> None:
        """End the thread, after the functions that it was given."""
        self._given.put(None)

    __del__ = close


def _serve(given: _Given) -> None:
    while (each := given.get()) is not None:
        function, has_returned = each
        take_device()
        function()
        del each, function  # it holds tensors
        has_returned.set()


_Base: Any = dist.Work


class Done(_Base):
    """An operation that is complete.

    Args:
        result: The tensors that the operation returned.
        algorithm: Name of the algorithm that it used.
    """

    def __init__(self, result: Sequence[Any], algorithm: str = "") -> None:
        _Base.__init__(self)  # super() would slow a small operation
        self._result = result
        self.algorithm = algorithm
        self.finished = time.perf_counter()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[Any]:
        """Return the tensors that the operation returned."""
        return list(self._result)

    def get_future(self) -> torch.futures.Future:
        """Return a complete future of the tensors."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(list(self._result))
        return future


class Work(_Base):
    """An operation under way.

    Once it was waited for, `finished` is the moment at which it was complete, on the clock of
    `time.perf_counter`.

    Args:
        core: The native core.
        group: The native group.
        ticket: The core's number for the operation.
        name: Name of the operation in errors.
        result: The tensors that the operation returns.
        operands: Objects that must not be freed before it is complete.
        abandon: Function that takes the ticket and the operands if this Work is deleted before the operation
            is complete. It belongs to the native group's owner, which it so keeps alive.
        algorithm: Name of the algorithm that it uses.
        finish: Function to call when the core is done, such as a copy of the result to its place.
        completer: Thread that completes the future while its caller computes; None: the caller's thread
            completes it.
        explain: Function that returns a failure with its cause; None: it is raised as it is.
    """

    def __init__(
        self,
        core: Core,
        group: int,
        ticket: int,
        name: str,
        *,
        result: Sequence[Any],
        operands: object,
        abandon: Callable[[int, object], None],
        algorithm: str = "",
        finish: Callable[[], None] | None = None,
        completer: Background | None = None,
        explain: Callable[[CollectiveError], CollectiveError] | None = None,
    ) -> None:
        super().__init__()
        self._core = core
        self._group = group
        self._ticket = ticket
        self._name = name
        self._result = result
        self._operands = operands
        self._abandon = abandon
        self._finish = finish
        self._completer = completer
        self._explain = explain
        self.algorithm = algorithm
        self.finished = 0.0
        self._failure: CollectiveError | None = None
        self._source = -1
        self._ending = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete.

        Args:
            timeout: Longest time to wait. The operation goes on after it, and can be waited for again. None
                or 0: the time limit of the operation itself, from its call or the group.

        Raises:
            CollectiveError: The operation failed, or is not complete within the timeout.
        """
        self._wait(timeout)
        if self._failure is not None:
            if self._explain is not None:
                self._failure, self._explain = self._explain(self._failure), None
            raise self._failure
        return True

    def _wait(self, timeout: timedelta | None = None) -> None:
        ticket = self._ticket
        if not ticket:
            return
        limit = timeout.total_seconds() if timeout else -1.0
        finished = ctypes.c_double()
        outcome = self._core.wait(self._group, ticket, limit, ctypes.byref(finished))
        if outcome in GOING_ON:
            self._core.check(outcome, f"waiting for {self._name}")
        with self._ending:
            if self._ticket:  # otherwise another waiting thread was first
                self._end(outcome, finished.value)

    def _end(self, outcome: int, finished: float) -> None:
        self.finished = finished
        try:
            self._source = self._core.check(outcome, self._name)
            if self._finish is not None:
                self._finish()
        except CollectiveError as failure:
            self._failure = failure
        self._core.forget(self._group, self._ticket)
        self._finish = self._operands = None
        self._ticket = 0

    def is_completed(self) -> bool:
        """Whether it is complete, or has failed."""
        return not self._ticket or bool(self._core.test(self._group, self._ticket))

    def is_success(self) -> bool:
        """Whether it is complete and has not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> CollectiveError | None:
        """What went wrong, once it is complete; None if nothing did."""
        if self.is_completed():
            self._wait()
        return self._failure

    def result(self) -> list[Any]:
        """The tensors that it gives, once it is complete."""
        self.wait()
        return list(self._result)

    def source_rank(self) -> int:
        """Return the rank that sent the received message."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors.

        Between hosts another thread completes it. Within one host it is complete when it is returned: the
        ranks' cores have to move the bytes anyway. A second thread would only share the core with the one
        that computes, and to hand over costs more than a small operation.
        """
        # Raise a failure within a callback: DistributedDataParallel ends the process if it is set from
        # outside.
        base: torch.futures.Future = torch.futures.Future()
        future = base.then(lambda _: self.result())
        if self._completer is None:
            base.set_result(None)
        else:
            self._completer.run(partial(base.set_result, None))
        return future

    def __del__(self) -> None:
        # A caller that drops a Work, such as DistributedDataParallel within a Join, may also drop the
        # tensors, although peers or the executor still write into them.
        if self._ticket:
            self._abandon(self._ticket, self._operands)


class Several(_Base):
    """Several operations as one Work.

    Args:
        works: The operations.
        result: The tensors that they return.
        finish: Function to call when all are complete.
    """

    def __init__(
        self, works: Sequence[dist.Work], result: Sequence[Any], finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self._works = works
        self._result = result
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are complete, each within the timeout; raise the first error."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Return whether all are complete or have failed."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all are complete and none has failed."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> CollectiveError | None:
        """Return the error of the first that failed; None if none failed."""
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self) -> list[Any]:
        """Return the tensors of the operations, once they are complete."""
        self.wait()
        return list(self._result)

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors, already complete."""
        base: torch.futures.Future = torch.futures.Future()
        future = base.then(lambda _: self.result())
        base.set_result(None)
        return future
