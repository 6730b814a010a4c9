"""Measurements of a run that show the speed of its machines: seconds of compute and of communications."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from shoal.plan import SettledPlan
from shoal.plan.groups import Group
from shoal.timeline import Kind, Lane, Timeline
from shoal.timeline.intervals import Intervals, intersect, length, union
from shoal.timeline.kinds import seconds_by_kind
from shoal.timeline.matching import match_collectives
from shoal.timeline.windows import StepWindows
from shoal.workload import Workload

__all__ = ["SENDS", "Observation", "Transfer", "transfers_of"]

SENDS = ("activation", "gradient", "shift")
"""Operations that send a message to one rank."""

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_LEAST_BYTES = 64 << 10  # least size of a transfer whose time depends on the rate and not on the latency


@dataclass(frozen=True, slots=True)
class Transfer:
    """Communications of one name, size and group form.

    Attributes:
        operation: Name of the operation: the part of a span's name before the colon.
        nbytes: Bytes, as the span counts them.
        group: The ranks that took part.
        seconds: Median seconds of one communication, counted from when all ranks of the group are there.
    """

    operation: str
    nbytes: int
    group: Group
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A run and its measured seconds in a step, as the mean over ranks.

    Attributes:
        workload: The work of the model that was trained.
        plan: The Plan that it ran under, with the micro-batch settled.
        batch: Samples of a step.
        compute: Seconds of forward and backward, without waits.
        optimizer: Seconds of the update.
        stragglers: Seconds that a rank waits for slower ranks.
        transfers: The collectives and messages.
    """

    workload: Workload
    plan: SettledPlan
    batch: int
    compute: float
    optimizer: float
    stragglers: float = 0.0
    transfers: tuple[Transfer, ...] = ()

    @classmethod
    def of(cls, workload: Workload, plan: SettledPlan, batch: int, timeline: Timeline) -> Observation:
        """Make the observation from a Timeline.

        Raises:
            ShoalError: No rank finished a step.
        """
        kinds = seconds_by_kind(timeline)
        return cls(
            workload=workload,
            plan=plan,
            batch=batch,
            compute=kinds["forward"] + kinds["backward"],
            optimizer=kinds["optimizer"],
            stragglers=kinds["straggler_wait"],
            transfers=transfers_of(timeline),
        )


def transfers_of(timeline: Timeline) -> tuple[Transfer, ...]:
    """Return the communications of a Timeline that show a rate: those that compute waited for, if any.

    A communication that runs beside compute can be slowed by it: on cores both take turns.
    """
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    waited: dict[tuple[str, int, Group], list[float]] = {}
    hidden: dict[tuple[str, int, Group], list[float]] = {}
    for rank, arrivals in match_collectives(timeline, windows).items():
        waits = _waits(timeline, rank)
        for arrival in arrivals:
            span, operation = arrival.span, arrival.span.name.partition(":")[0]
            took = span.stop - arrival.complete
            is_known = operation in (*_COLLECTIVES, *SENDS) and len(span.group) > 1
            if not is_known or span.bytes < _LEAST_BYTES or took <= 0:
                continue
            key = operation, span.bytes, Group.of(span.group)
            exposed = length(intersect(waits, [(arrival.complete, span.stop)]))
            (waited if exposed > took / 2 else hidden).setdefault(key, []).append(took)
    return tuple(Transfer(*key, median(took)) for key, took in (waited or hidden).items())


def _waits(timeline: Timeline, rank: int) -> Intervals:
    return union(
        (span.start, span.stop)
        for span in timeline.of(rank)
        if span.lane == Lane.COMPUTE and span.kind == Kind.WAIT
    )
