"""Agreement through a store, for a thread beside the training.

The training's process groups cannot be used: two threads of a rank would join their collectives in any
order, and another order on another rank. The store that the ranks met in takes requests from any thread.
"""

from __future__ import annotations

import base64
import contextlib
import math
import pickle
import time
from collections.abc import Iterator
from typing import Any, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from shoal.checkpoint.coordinator import Coordinator, SingleProcess
from shoal.errors import CommunicationError

__all__ = ["StoreCoordinator", "coordinator_beside"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.05  # seconds between two looks at the store


@final
class StoreCoordinator:
    """A Coordinator over a `torch.distributed` store.

    In each round every rank puts its value into the store. To gather on all ranks, the one that comes last
    puts all values together, and the others take them from there. A rank that waits looks again and again,
    since a wait within the store would hold up the other threads of its process. Keys are removed when all
    ranks have read them, which they have once they come to a later round.

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
        self._read = ""  # the key that all ranks read last
        self._patience = math.inf
        self._since = 0.0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order.

        Raises:
            CommunicationError: The store does not answer, or another rank did not come in time.
        """
        with _store_errors():
            self._round += 1
            everyone, count = f"{self._round} everyone", f"{self._round} count"
            self._put(value)
            if self._store.add(count, 1) == self.size:
                texts = self._take_all()
                self._store.set(everyone, "\n".join(texts))
                for key in (count, self._read):
                    self._store.delete_key(key)
            else:
                self._wait_for([everyone])
                texts = self._store.get(everyone).decode("ascii").split("\n")
            self._read = everyone
        return [_value(text) for text in texts]

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return the value of every rank on rank 0, and None on the others; errors as in the other one."""
        with _store_errors():
            self._round += 1
            self._put(value)
            if self.rank > 0:
                return None
            self._wait_for(self._keys())
            return [_value(text) for text in self._take_all()]

    def give_up_after(self, seconds: float) -> None:
        """Wait for other ranks no longer than so many seconds, from now on; call it from any thread."""
        self._since, self._patience = time.monotonic(), seconds

    def _put(self, value: Any) -> None:
        self._store.set(self._keys()[self.rank], base64.b64encode(pickle.dumps(value)).decode("ascii"))

    def _take_all(self) -> list[str]:
        """Return what all ranks have put, and remove it."""
        keys = self._keys()
        texts = [self._store.get(key).decode("ascii") for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return texts

    def _wait_for(self, keys: list[str]) -> None:
        pause, began = _FIRST_PAUSE, time.monotonic()
        while not self._store.check(keys):
            if time.monotonic() - max(began, self._since) > self._patience:
                raise CommunicationError(f"other ranks did not come within {self._patience:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _keys(self) -> list[str]:
        return [f"{self._round} of {rank}" for rank in range(self.size)]


def _value(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


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
