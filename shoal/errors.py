"""Every error that Shoal raises on purpose.

ShoalError                    anything that Shoal itself reports; exit code 1
├── UserError                 wrong input; exit code 2, no traceback
│   ├── ConfigError           a key or a value of the configuration
│   ├── PlanError             a Plan that is malformed, or does not fit the ranks, batch or model
│   ├── DataError             text or tokens that are missing, empty or unreadable
│   ├── ModelError            a preset, factory or checkpoint that does not give a model
│   ├── LayoutError           a use of a model that needs it whole, when it is laid over ranks
│   ├── ClusterError          a description of machines that contradicts itself, or cannot be read
│   ├── RunError              a run directory that exists, is missing, or is not one
│   └── MissingExtraError     an optional package that is not installed
├── CheckpointError           a checkpoint could not be written or found
│   └── CorruptCheckpointError    a checkpoint is there, but differs from its manifest
├── CommunicationError        a collective failed, most often because another rank did
│   └── CollectiveError       an operation of the backend "shoal" failed; names the rank and the fault
├── ReplicaError              this rank holds other bits than its replicas
├── OffloadError              offloaded state could not be read or written, such as on a full disk
├── LostProcessError          a process that prepares data was lost, and the one in its place too
├── TrainingError             training cannot go on, such as after a loss that is not a number
└── WorkerError               a rank failed; names the rank that failed first
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ClusterError",
    "CollectiveError",
    "CommunicationError",
    "ConfigError",
    "CorruptCheckpointError",
    "DataError",
    "LayoutError",
    "LostProcessError",
    "MissingExtraError",
    "ModelError",
    "OffloadError",
    "PlanError",
    "ReplicaError",
    "RunError",
    "ShoalError",
    "TrainingError",
    "UserError",
    "WorkerError",
    "nearest",
]


class ShoalError(Exception):
    """The root of the tree above."""

    exit_code = 1


class UserError(ShoalError):
    """Something the user gave cannot work, and the user can change it.

    Args:
        given: The value that was given, and why it cannot work, as one sentence.
        possible: The values that would be accepted.
        change: The change to make, as an instruction.
    """

    exit_code = 2

    def __init__(self, given: str, *, possible: str, change: str) -> None:
        super().__init__(given, possible, change)
        self.given = given
        self.possible = possible
        self.change = change

    def __str__(self) -> str:
        return f"{self.given}\n  possible: {self.possible}\n  change: {self.change}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_user_error, (type(self), self.given, self.possible, self.change)


class ConfigError(UserError):
    """A key or a value of the configuration cannot be used."""


class PlanError(UserError):
    """A Plan is malformed, or does not fit the ranks, the batch or the model."""


class DataError(UserError):
    """Text or tokens are missing, empty or unreadable."""


class ModelError(UserError):
    """A preset, a factory or a saved model does not give a model."""


class LayoutError(UserError):
    """A model that is laid over ranks was used in a way that only a whole model allows."""


class ClusterError(UserError):
    """A description of machines contradicts itself, is unknown, or cannot be read."""


class RunError(UserError):
    """A run directory exists where a new one was asked for, is missing, or is not one."""


class MissingExtraError(UserError):
    """An optional package is not installed.

    Args:
        purpose: The purpose that needs the package, such as "reading parquet".
        package: The module that could not be imported.
        extra: The extra of Shoal that installs it.
    """

    def __init__(self, purpose: str, *, package: str, extra: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed",
            possible=f"the extra {extra!r} installs it",
            change=f"run: pip install 'shoal[{extra}]'",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_user_error, (UserError, self.given, self.possible, self.change)


class CheckpointError(ShoalError):
    """A checkpoint could not be written or found."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is there, but differs from its manifest."""


class CommunicationError(ShoalError):
    """A collective failed on this rank, most often because another rank of its group is gone."""


class CollectiveError(CommunicationError, RuntimeError):
    """An operation of the backend "shoal" failed. It is a RuntimeError, like the errors of other backends.

    Args:
        text: What failed, and why.
        rank: The rank of the group that caused it; -1 if none did.
        fault: Kind of fault: "invalid", "timeout", "peer lost", "peer stopped", "aborted", "mismatch",
            "system" or "refused".
    """

    def __init__(self, text: str, *, rank: int = -1, fault: str = "system") -> None:
        super().__init__(text)
        self.rank = rank
        self.fault = fault

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_collective_error, (str(self), self.rank, self.fault)


class OffloadError(ShoalError):
    """Offloaded state could not be read or written: the state here is lost, and checkpoints are as before."""


class LostProcessError(ShoalError):
    """A process that prepares data has ended before its time, such as by SIGKILL where memory is short."""


class ReplicaError(ShoalError):
    """This rank holds other bits than its replicas: its state is not to be used."""


class TrainingError(ShoalError):
    """Training cannot go on."""


class WorkerError(ShoalError):
    """A rank failed, and the run with it.

    Args:
        rank: The rank that failed first; -1 if none did, and the ranks have lost each other.
        reason: Its error, in one line.
        detail: Other facts, such as its traceback.
        exit_code: Exit code for the process that reports this.

    Attributes:
        host: Where the rank was, if there are several hosts.
    """

    def __init__(self, rank: int, reason: str, *, detail: str = "", exit_code: int = 1) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason
        self.detail = detail
        self.exit_code = exit_code
        self.host = ""

    def __str__(self) -> str:
        if self.rank < 0:
            return self.reason
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank} failed{where}: {self.reason}"


def nearest(given: str, options: Iterable[str]) -> str:
    """Return the text " (did you mean 'x'?)" for the option closest to `given`, or "" if none is close."""
    close = difflib.get_close_matches(given, list(options), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _rebuild_user_error(kind: type[UserError], given: str, possible: str, change: str) -> UserError:
    return kind(given, possible=possible, change=change)


def _rebuild_collective_error(text: str, rank: int, fault: str) -> CollectiveError:
    return CollectiveError(text, rank=rank, fault=fault)
