"""Agreement through a store, for a thread beside the training.

The training's process groups cannot be used: two threads of a rank would join their collectives in any
order, and another order on another rank. The store that the ranks met in takes requests from any thread.
"""

from __future__ import annotations

import base64
import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from shoal.checkpoint.coordinator import Coordinator, SingleProcess
from shoal.errors import CommunicationError
from shoal.values import decode, encode

__all__ = ["StoreCoordinator", "coordinator_beside"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.05  # seconds between two looks at the store


@final
class StoreCoordinator:
    """A Coordinator over a `torch.distributed` store.

    In each round every rank puts its value into the store, and rank 0 takes all of them out. To tell all
    ranks, it puts them together into the store, and removes them when all have read them: it may be the
    process that serves the store, and must not leave earlier. A rank that waits looks again and again, since
    a wait within the store would hold up the other threads of its process.

    Args:
        store: The ranks' common store, for these ranks and this purpose alone.
        rank: This process's rank.
        size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._round = 0
        self._patience = math.inf
        self._since = 0.0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order.

        Raises:
            CommunicationError: The store does not answer, or another rank did not come in time.
        """
        with _store_errors():
            texts = self._gather(value)
            everyone, read = f"{self._round} everyone", self._keys("read by")
            if texts is None:
                self._wait_for([everyone])
                texts = self._store.get(everyone).decode("ascii").split("\n")
                self._store.set(read[self.rank], "")
            else:
                self._store.set(everyone, "\n".join(texts))
                self._wait_for(read[1:])
                self._remove([everyone, *read[1:]])
        return [_value(text) for text in texts]

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return the value of every rank on rank 0, and None on the others; errors as in the other one."""
        with _store_errors():
            texts = self._gather(value)
        return None if texts is None else [_value(text) for text in texts]

    def give_up_after(self, seconds: float) -> None:
        """Wait for other ranks no longer than so many seconds, from now on; call it from any thread."""
        self._since, self._patience = time.monotonic(), seconds

    def _gather(self, value: Any) -> list[str] | None:
        self._round += 1
        keys = self._keys("of")
        self._store.set(keys[self.rank], base64.b64encode(encode(value)).decode("ascii"))
        if self.rank > 0:
            return None
        self._wait_for(keys)
        texts = [self._store.get(key).decode("ascii") for key in keys]
        self._remove(keys)
        return texts

    def _remove(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def _wait_for(self, keys: list[str]) -> None:
        pause, began = _FIRST_PAUSE, time.monotonic()
        while not self._store.check(keys):
            if time.monotonic() - max(began, self._since) > self._patience:
                raise CommunicationError(f"other ranks did not come within {self._patience:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _keys(self, what: str) -> list[str]:
        return [f"{self._round} {what} {rank}" for rank in range(self.size)]


def _value(text: str) -> Any:
    return decode(base64.b64decode(text))


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the stores raise this
        raise CommunicationError(f"the store of the ranks does not answer: {error}") from error


def coordinator_beside() -> Coordinator:
    """Return a Coordinator of the ranks of the default process group, for a thread beside the training.

    All ranks call it together. Each call returns a new one, which shares nothing with the others.
    """
    if not dist.is_initialized():
        return SingleProcess()
    store, rank = _get_default_store(), dist.get_rank()
    number = store.add(f"coordinators beside rank {rank}", 1)
    return StoreCoordinator(PrefixStore(f"beside {number}", store), rank, dist.get_world_size())
