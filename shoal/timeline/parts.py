"""The figures of one step of one rank, and their averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of the time of one step, or of an average step, in seconds.

    The first eight are disjoint and sum to `wall`.

    Attributes:
        compute: Forward, backward and optimizer, while not blocked.
        launch: Idle time of the device because the host had not given it the next work yet; None if the host
            itself computes, or if the Timeline is predicted.
        exposed_communication: Communication that nothing overlaps and that no late rank explains.
        bubble: Idle time that the pipeline schedule forces.
        data_wait: Waiting for input data.
        file_wait: Waiting for files of offloaded state; None if the Timeline has no such wait.
        straggler_wait: Exposed communication before the last rank of a collective's group started it.
        other: Time that no span explains.
        wall: The step, from start to end.
        communication: All communication, overlapped or not.
        overlapped_communication: Communication during which the rank computes, or waits for data or files.
        bytes: Bytes of the collectives that start in the step.
    """

    compute: float
    launch: float | None = None
    exposed_communication: float
    bubble: float
    data_wait: float
    file_wait: float | None = None
    straggler_wait: float
    other: float
    wall: float
    communication: float
    overlapped_communication: float
    bytes: float

    def disjoint(self) -> dict[str, float]:
        """The parts that sum to `wall`, by name, in seconds; without those that are None."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)[:8]}
        return {name: seconds for name, seconds in parts.items() if seconds is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFigures:
    """The figures of one operation, per rank and step.

    Attributes:
        count: Number of them that start.
        bytes: Bytes that they carry, as in `Span.bytes`.
        seconds: Sum of their durations.
        exposed_seconds: Exposed communication that they cover; operations that run at one time cover it
            together.
        transfer_seconds: Sum of their durations after the whole group had arrived.
    """

    count: float
    bytes: float
    seconds: float
    exposed_seconds: float
    transfer_seconds: float

    @property
    def algbw(self) -> float | None:
        """Bytes/s while the whole group was there, as in nccl-tests; None if no time passed."""
        return self.bytes / self.transfer_seconds if self.transfer_seconds > 0 else None


Figures = TypeVar("Figures", Parts, CollectiveFigures)

_NO_COLLECTIVES = CollectiveFigures(count=0, bytes=0, seconds=0, exposed_seconds=0, transfer_seconds=0)


def mean(figures: Sequence[Figures]) -> Figures:
    """Return the mean of one or more, field by field; None counts as zero, unless all are None."""
    kind = type(figures[0])
    by_name: dict[str, list[Any]] = {
        field.name: [getattr(each, field.name) for each in figures] for field in fields(kind)
    }
    means: dict[str, Any] = {
        name: None if all(each is None for each in values) else fmean(each or 0.0 for each in values)
        for name, values in by_name.items()
    }
    return kind(**means)


def mean_by_operation(figures: Sequence[Mapping[str, CollectiveFigures]]) -> dict[str, CollectiveFigures]:
    """Return the mean of each operation, by name; an absent one counts as zero."""
    operations = sorted({operation for each in figures for operation in each})
    return {
        operation: mean([each.get(operation, _NO_COLLECTIVES) for each in figures])
        for operation in operations
    }
