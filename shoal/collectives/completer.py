"""A thread that completes futures while their caller computes, as DistributedDataParallel needs."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import torch

__all__ = ["Completer"]


class Completer:
    """A thread that sets futures one after the other, in the order in which they were given.

    The futures' own callbacks (`torch.futures.Future.then`) do the waiting, and they run in that thread. It
    starts with the first future.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[torch.futures.Future[None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def set(self, future: torch.futures.Future[None]) -> None:
        """Set the future's result to None, after the futures that were given before."""
        if self._thread is None:
            # A daemon: a process that ends without waiting for a future does not wait for this thread.
            self._thread = threading.Thread(target=_serve, args=(self._given,), name="shoal", daemon=True)
            self._thread.start()
        self._given.put(future)

    def close(self) -> None:
        """End the thread, after the futures that it was given."""
        self._given.put(None)


def _serve(given: SimpleQueue[torch.futures.Future[None] | None]) -> None:
    while (future := given.get()) is not None:
        future.set_result(None)
        del future  # its callbacks hold tensors
