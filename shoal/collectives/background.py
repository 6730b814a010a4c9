"""A thread that runs functions in order while the caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from shoal.collectives.thread_device import on_callers_device, take_device

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
