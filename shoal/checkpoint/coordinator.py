"""Agreement between the ranks that share a checkpoint.

Each part of a protocol is an attempt that every rank makes. Then all ranks tell each other the result, so
that all go on, or all raise the same error.

A thread beside the training cannot use the training's process groups: two threads of a rank would join their
collectives in any order, and another order on another rank. The store that the ranks met in takes requests
from any thread.
"""

from __future__ import annotations

import base64
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from shoal.checkpoint.manifest import Manifest
from shoal.collectives.values import all_gather_value, gather_value
from shoal.errors import CheckpointError, CommunicationError, CorruptCheckpointError, RunError
from shoal.values import decode, encode

T = TypeVar("T")
Result = TypeVar("Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.05  # seconds between two looks at the store


class Coordinator(Protocol):
    """The ranks that save or load one checkpoint together, on a file system that all of them see."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order. Raise an error if a rank has died.

        Args:
            value: A value that `shoal.values.encode` takes.
        """
        ...

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return the value of every rank on rank 0, and None on the others, which need not wait."""
        ...


class SingleProcess:
    """A Coordinator of one rank."""

    rank = 0
    size = 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list of this value only."""
        return [value]

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return a list of this value only."""
        return [value]


class ProcessGroupCoordinator:
    """A Coordinator over a `torch.distributed` process group.

    Args:
        group: The group; None is the default group. Prefer a group whose backend works on the CPU, because
            the ranks exchange small Python objects.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value of every rank of the group, in rank order.

        Raises:
            CommunicationError: Another rank is gone.
        """
        try:
            return all_gather_value(value, self._group)
        except RuntimeError as error:
            raise CommunicationError(f"ranks could not tell each other a value: {error}") from error

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return the value of every rank of the group on rank 0, and None on the others.

        Raises:
            CommunicationError: Another rank is gone.
        """
        try:
            return gather_value(value, self._group)
        except RuntimeError as error:
            raise CommunicationError(f"ranks could not tell rank 0 a value: {error}") from error


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


class Spread(Protocol):
    """How the checkpoints of one directory are spread over hosts."""

    @property
    def directory(self) -> Path:
        """This host's directory."""

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its host."""

    @property
    def first(self) -> int:
        """The rank that acts for this rank's host."""

    def copy(self, staging: Path, manifest: Manifest) -> None:
        """Copy files that other hosts have written, whose checkpoint is not complete yet."""

    def require(self, path: Path, manifest: Manifest, names: Iterable[str]) -> None:
        """Get files of a checkpoint that this host lacks, verified, from others.

        Raises:
            CorruptCheckpointError: No other host has a file as the manifest says.
        """


def all_ranks() -> Coordinator:
    """Return all ranks of the default process group, or this process alone."""
    return ProcessGroupCoordinator() if dist.is_initialized() else SingleProcess()


def coordinator_beside() -> Coordinator:
    """Return a Coordinator of the ranks of the default process group, for a thread beside the training.

    All ranks call it together. Each call returns a new one, which shares nothing with the others.
    """
    if not dist.is_initialized():
        return SingleProcess()
    store, rank = _get_default_store(), dist.get_rank()
    number = store.add(f"coordinators beside rank {rank}", 1)
    return StoreCoordinator(PrefixStore(f"beside {number}", store), rank, dist.get_world_size())


@dataclass(frozen=True)
class _Failure:
    rank: int
    reason: str
    corrupt: bool


def attempt_together(coordinator: Coordinator, purpose: str, attempt: Callable[[], T]) -> list[T]:
    """Make the same attempt on every rank; either all succeed or all raise the same error.

    Args:
        coordinator: The ranks.
        purpose: Beginning of the error message, such as "cannot save step 100".
        attempt: Function that this rank calls. Its result is sent to every rank.

    Returns:
        The result of every rank, in rank order.

    Raises:
        CorruptCheckpointError: A rank found the checkpoint corrupt.
        CheckpointError: A rank failed in any other way; the first such rank and its reason are named.
    """
    outcome, cause = _outcome(coordinator, attempt)
    return _results(purpose, coordinator.all_gather_object(outcome), cause)


def attempt_on_rank_zero(coordinator: Coordinator, purpose: str, attempt: Callable[[], T]) -> T:
    """Make an attempt on rank 0 alone and give every rank its result; errors as in `attempt_together`."""
    results = attempt_together(coordinator, purpose, lambda: attempt() if coordinator.rank == 0 else None)
    return cast(T, results[0])


def attempt_for_rank_zero(
    coordinator: Coordinator,
    purpose: str,
    attempt: Callable[[], T],
    then: Callable[[list[T]], Result],
) -> Result:
    """Make the same attempt on every rank, and another one on rank 0 with the results of all.

    Only rank 0 gets all results. Errors are as in `attempt_together`.

    Args:
        coordinator: The ranks.
        purpose: Beginning of the error message.
        attempt: Function that this rank calls.
        then: Function that rank 0 calls with the results, in rank order, if all ranks succeeded.

    Returns:
        On every rank, what `then` returned.
    """
    outcome, cause = _outcome(coordinator, attempt)
    gathered = coordinator.gather_object(outcome)
    last: Result | _Failure | None = None
    if gathered is not None:
        last = next((each for each in gathered if isinstance(each, _Failure)), None)
        if last is None:
            last, cause = _outcome(coordinator, lambda: then(gathered))
    return cast(Result, _results(purpose, coordinator.all_gather_object(last), cause)[0])


def _outcome(coordinator: Coordinator, attempt: Callable[[], T]) -> tuple[T | _Failure, Exception | None]:
    """Return what an attempt gave, or why it failed: the other ranks wait for it, whatever the error."""
    try:
        return attempt(), None
    except Exception as error:
        return _Failure(coordinator.rank, _reason(error), isinstance(error, CorruptCheckpointError)), error


def _results(purpose: str, outcomes: list[T | _Failure], cause: Exception | None) -> list[T]:
    """Return the results, or raise the first failure."""
    results: list[T] = []
    for outcome in outcomes:
        if not isinstance(outcome, _Failure):
            results.append(outcome)
        elif outcome.corrupt:
            raise CorruptCheckpointError(outcome.reason) from cause
        else:
            raise CheckpointError(f"{purpose}: rank {outcome.rank}: {outcome.reason}") from cause
    return results


def _reason(error: Exception) -> str:
    if isinstance(error, (CheckpointError, RunError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return f"{type(error).__name__}: {error}"
