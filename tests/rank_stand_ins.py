"""Ranks without processes: a Coordinator between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shoal.checkpoint import Coordinator
from shoal.errors import ShoalError


class ThreadExchange:
    """A Coordinator between threads."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self.slots = slots
        self.barrier = barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def gather_object(self, value: Any) -> list[Any] | None:
        values = self.all_gather_object(value)
        return values if self.rank == 0 else None


def on_ranks(size: int, function: Callable[[Coordinator], Any]) -> list[Any]:
    """What `function` returned on each of `size` ranks, or the ShoalError that it raised there."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=120)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadExchange(rank, slots, barrier))
        except ShoalError as error:
            results[rank] = error
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ShoalError):
            raise result
    return results
