"""An operation that was begun: what `torch.distributed` calls a Work."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.collectives.completer import Completer
from shoal.collectives.core import GOING_ON, Core
from shoal.errors import CollectiveError

__all__ = ["Done", "Work"]


_Base: Any = dist.Work


class Done(_Base):
    """An operation that is complete.

    Args:
        result: The tensors that it gave.
        algorithm: The name of the one used.
    """

    def __init__(self, result: Sequence[Any], algorithm: str = "") -> None:
        _Base.__init__(self)  # a small operation notices super()
        self._result = result
        self.algorithm = algorithm
        self.finished = time.perf_counter()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> None:
        """None."""

    def result(self) -> list[Any]:
        """The tensors that it gave."""
        return list(self._result)

    def get_future(self) -> torch.futures.Future:
        """A future of the tensors, complete."""
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
        ticket: What the core gave for the operation.
        name: Of the operation, for errors.
        result: The tensors that it gives.
        operands: What must not be freed before it is complete.
        abandon: Takes the ticket and the operands if this goes before the operation is complete. It belongs
            to the native group's owner, which so stays as long as this.
        algorithm: The name of the one used.
        finish: What remains to be done when the core is done, such as copying to where the result is wanted.
        completer: Completes the future, while the thread that asks for it computes; None: that thread does.
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
        completer: Completer | None = None,
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
        self.algorithm = algorithm
        self.finished = 0.0
        self._failure: CollectiveError | None = None
        self._source = -1
        self._ending = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns once the operation is complete.

        Args:
            timeout: How long to wait; the operation goes on after it, and can be waited for again. None or 0:
                as long as the operation itself may take, which its call or the group says.

        Raises:
            CollectiveError: It failed, or is not complete within the timeout.
        """
        self._wait(timeout)
        if self._failure is not None:
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
            if self._ticket:  # otherwise another thread that waited was first
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
        """Return the rank that sent what was received."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of the tensors.

        Between hosts another thread completes it. Within one it is complete when it is returned: the ranks'
        cores have to move the bytes anyway, so that a thread beside the one that computes would only take
        turns with it, and handing over costs more than a small operation.
        """
        # A failure has to be raised within a callback: DistributedDataParallel ends the process on one that
        # was set from outside.
        base: torch.futures.Future = torch.futures.Future()
        future = base.then(lambda _: self.result())
        if self._completer is None:
            base.set_result(None)
        else:
            self._completer.set(base)
        return future

    def __del__(self) -> None:
        # Who drops a Work, as DistributedDataParallel does within a Join, may drop the tensors too, into
        # which peers or the executor still write.
        if self._ticket:
            self._abandon(self._ticket, self._operands)


class Several(_Base):
    """Operations that were begun together.

    Args:
        works: The operations.
        result: The tensors that they give.
        finish: What remains to be done when all are complete.
    """

    def __init__(
        self, works: Sequence[dist.Work], result: Sequence[Any], finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self._works = works
        self._result = result
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns once all are complete, within the timeout each; raises what went wrong first."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether all are complete, or have failed."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are complete and none has failed."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> CollectiveError | None:
        """What went wrong in the first that failed; None if nothing did."""
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self) -> list[Any]:
        """The tensors that they give, once they are complete."""
        self.wait()
        return list(self._result)

    def get_future(self) -> torch.futures.Future:
        """A future of the tensors, complete when it is returned."""
        base: torch.futures.Future = torch.futures.Future()
        future = base.then(lambda _: self.result())
        base.set_result(None)
        return future
