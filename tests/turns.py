"""Workers of parameter servers that take turns, so that the staleness of each contribution is known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shoal.parallel.exchange.server import Servers


class Turns:
    """Let workers join, and then push and pull, in the order of their numbers.

    Then each gradient is of values that all other workers have updated since. A contribution to a round waits
    for no turn.

    Args:
        workers: Number of workers.
        pushes: Pushes of each; after its last one a worker waits for all others.
    """

    def __init__(self, workers: int, pushes: int) -> None:
        self._workers = workers
        self._pushes = pushes
        self._changed = threading.Condition()
        self._joined = self._ready = self._next = 0

    def guide(self, number: int, way: Servers) -> None:
        """Let a worker take its turns."""
        join, push, pull = way.join, way.push, way.pull
        has_pulled = has_turn = False
        left = self._pushes

        def join_in_turn(*arguments: Any) -> Any:
            self._wait(lambda: self._joined == number)
            ticket = join(*arguments)
            self._count("_joined")
            return ticket

        def push_in_turn(*arguments: Any, **named: Any) -> Any:
            nonlocal has_turn, left
            left -= 1
            if named["base"] is None:
                return push(*arguments, **named)
            self._wait(lambda: self._ready == self._workers and self._next % self._workers == number)
            staleness = push(*arguments, **named)
            has_turn = left > 0
            if not has_turn:
                self._count("_next")
            return staleness

        def pull_in_turn(*arguments: Any, **named: Any) -> Any:
            nonlocal has_pulled, has_turn
            versions = pull(*arguments, **named)
            if not has_pulled:
                has_pulled = True
                self._count("_ready")
            if has_turn:
                has_turn = False
                self._count("_next")
            return versions

        way.join, way.push, way.pull = join_in_turn, push_in_turn, pull_in_turn  # type: ignore[method-assign]

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_over, timeout=120)

    def _count(self, name: str) -> None:
        with self._changed:
            setattr(self, name, getattr(self, name) + 1)
            self._changed.notify_all()
