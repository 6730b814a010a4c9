"""Agreement between the ranks that share a checkpoint.

Each part of a protocol is an attempt that every rank makes. Then all ranks tell each other the result, so
that all go on, or all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch.distributed

from shoal.errors import CheckpointError, CommunicationError, CorruptCheckpointError

__all__ = [
    "Coordinator",
    "ProcessGroupCoordinator",
    "SingleProcess",
    "attempt_on_rank_zero",
    "attempt_together",
]

T = TypeVar("T")


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
        """Return the picklable `value` of every rank, in rank order. Raise an error if a rank has died."""
        ...


class SingleProcess:
    """A Coordinator of one rank."""

    rank = 0
    size = 1

    def all_gather_object(self, value: Any) -> list[Any]:
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
        values: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise CommunicationError(f"all_gather_object failed: {error}") from error
        return values


@dataclass(frozen=True)
class _Failure:
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
    outcome: T | _Failure
    cause: Exception | None = None
    try:
        outcome = attempt()
    except Exception as error:  # the other ranks wait for the result, so report any error
        cause = error
        outcome = _Failure(_reason(error), isinstance(error, CorruptCheckpointError))
    results: list[T] = []
    for rank, other in enumerate(coordinator.all_gather_object(outcome)):
        if not isinstance(other, _Failure):
            results.append(other)
        elif other.corrupt:
            raise CorruptCheckpointError(other.reason) from cause
        else:
            raise CheckpointError(f"{purpose}: rank {rank}: {other.reason}") from cause
    return results


def attempt_on_rank_zero(coordinator: Coordinator, purpose: str, attempt: Callable[[], T]) -> T:
    """Make an attempt on rank 0 alone and give every rank its result; errors as in `attempt_together`."""
    results = attempt_together(coordinator, purpose, lambda: attempt() if coordinator.rank == 0 else None)
    return cast(T, results[0])


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return f"{type(error).__name__}: {error}"
