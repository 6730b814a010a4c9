"""Prepares the next few micro-batches in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from shoal.collectives.thread_device import on_callers_device, take_device
from shoal.data.generators import shared_with_training

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over `source`, up to `depth` items ahead of the consumer.

    It changes when items are made, not which items: `close` drops items that were not taken, and nothing is
    lost, because the consumer holds the position. An exception in `source` is raised in the
    consumer, after the items that were made before it. Use it as a context manager, or call `close`.

    Args:
        source: The items; only the thread uses it.
        depth: Number of items that may wait to be taken.

    Raises:
        ValueError: `depth` is not positive.
    """

    def __init__(self, source: Iterable[Item], *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._finished = False  # the source has ended or failed, or close() was called
        self._changed = threading.Condition()
        fill = on_callers_device(self._fill)  # a user's source may compute on the GPU
        self._thread = threading.Thread(target=fill, args=(source,), name="shoal-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """End the iteration, and wait until the thread has ended. A second call does nothing."""
        with self._changed:
            self._finished = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fill(self, source: Iterable[Item]) -> None:
        """Make an item whenever fewer than `depth` wait; this is the thread's function."""
        try:
            items = iter(source)
            while self._has_room():
                take_device()
                with shared_with_training():
                    item = next(items)
                with self._changed:
                    if not self._finished:
                        self._ready.append(item)
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until an item may be made; return False once the iteration is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or len(self._ready) < self._depth)
            return not self._finished
