"""Agreement between the ranks that share a checkpoint.

Each part of a protocol is an attempt that every rank makes. Then all ranks tell each other the result, so
that all go on, or all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch.distributed

from shoal.collectives.values import all_gather_value, gather_value
from shoal.errors import CheckpointError, CommunicationError, CorruptCheckpointError, RunError

__all__ = [
    "Coordinator",
    "ProcessGroupCoordinator",
    "SingleProcess",
    "attempt_for_rank_zero",
    "attempt_on_rank_zero",
    "attempt_together",
]

T = TypeVar("T")
Result = TypeVar("Result")


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

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

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
