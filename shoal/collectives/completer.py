"""Futures completed while their asker computes, which DistributedDataParallel needs between hosts."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import torch

__all__ = ["Completer"]


class Completer:
    """A thread that sets futures, one after the other, in the order in which they were given.

    What has to be waited for is done by the futures' own callbacks (`torch.futures.Future.then`), and so in
    that thread. It begins with the first future.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[torch.futures.Future[None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def set(self, future: torch.futures.Future[None]) -> None:
        """Sets the future's result to None, after those of the futures that were given before."""
        if self._thread is None:
            # A daemon: who ends without having waited for a future is not held back by it.
            self._thread = threading.Thread(target=_serve, args=(self._given,), name="shoal", daemon=True)
            self._thread.start()
        self._given.put(future)

    def close(self) -> None:
        """Ends the thread, after what it was given."""
        self._given.put(None)


def _serve(given: SimpleQueue[torch.futures.Future[None] | None]) -> None:
    while (future := given.get()) is not None:
        future.set_result(None)
        del future  # it holds tensors, by its callbacks
