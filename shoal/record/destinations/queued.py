"""A logger in a thread of its own: a receiver that is slow, or gone, holds up no step.

Steps put their values into a queue and go on. If the queue is full, the values are dropped and counted. The
thread makes the receiver, gives it the values, and closes it. The first error is reported, and the number of
values that were lost is reported at the end. The thread looks into the queue four times a second: a thread
that woke at every step would cost short steps more than the values themselves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import final

from shoal.collectives.thread_device import on_callers_device, take_device
from shoal.record.logger import Logger

_QUEUED = 1_000
"""Steps that may wait."""
_LOOK = 0.25
"""Seconds between two looks into the queue."""
_CLOSING = 10.0
"""Seconds for which the end of a run waits for a receiver."""
_FAILURES = 20
"""Failures in a row after which a receiver gets nothing more."""


@final
class QueuedLogger(Logger):
    """Give values to a logger in a thread.

    Args:
        name: Name of the receiver, for reports.
        make: Makes the logger; called in the thread.
        say: Called with reports, one line each, from any thread.
        closing: Seconds for which `close` waits; None for 10.
        newest: Whether only the newest value of each name counts: values that wait are given as one.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Logger],
        say: Callable[[str], object],
        closing: float | None = None,
        newest: bool = False,
    ) -> None:
        self._name = name
        self._make = make
        self._say = say
        self._closing = _CLOSING if closing is None else closing
        self._newest = newest
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._lost = 0
        self._failures = 0  # in a row
        self._is_ending = threading.Event()
        work = on_callers_device(self._work)  # a user's logger may look at the GPU
        self._thread = threading.Thread(target=work, name=f"shoal {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`; it never waits."""
        if len(self._waiting) < _QUEUED:
            self._waiting.append((step, dict(values)))
        else:
            self._lost += 1

    def close(self) -> None:
        """See `Logger.close`; it waits for some seconds until all is given."""
        self._is_ending.set()
        self._thread.join(self._closing)
        if self._thread.is_alive():
            self._lost += len(self._waiting)
            self._say(f"{self._name} did not take all values within {self._closing:g} s")
        if self._lost:
            self._say(f"{self._name} lacks the values of {self._lost} steps")
            self._lost = 0

    def _work(self) -> None:
        try:
            logger = self._make()
        except Exception as error:
            self._report(error)
            self._lose_all()
            return
        while (taken := self._next()) is not None:
            step, values, count = taken
            if self._failures >= _FAILURES:
                self._lost += count
                continue
            take_device()
            try:
                logger.log(step, values)
                self._failures = 0
            except Exception as error:  # the code of others: training survives any error of it
                self._lost += count
                self._report(error)
        take_device()
        try:
            logger.close()
        except Exception as error:
            self._report(error)

    def _next(self) -> tuple[int, Mapping[str, float], int] | None:
        """Return the next step, its values and how many steps they stand for; None after the last."""
        while not self._waiting:
            # What was put before the end must not be left.
            if self._is_ending.wait(_LOOK) and not self._waiting:
                return None
        step, values = self._waiting.popleft()
        merged, count = dict(values), 1
        while self._newest and self._waiting:
            step, values = self._waiting.popleft()
            merged |= values
            count += 1
        return step, merged, count

    def _lose_all(self) -> None:
        while (taken := self._next()) is not None:
            self._lost += taken[2]

    def _report(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            self._say(f"{self._name} failed: {type(error).__name__}: {error}")
        elif self._failures == _FAILURES:
            self._say(f"{self._name} failed {_FAILURES} times in a row, and gets nothing more")
