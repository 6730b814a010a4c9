"""Play a schedule with given times: when each action starts and stops, and how long ranks are idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.plan.schedules.action import Action, Work
from shoal.plan.schedules.precedence import Precedence
from shoal.plan.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Times:
    """The times of each piece of work of one micro-batch, in seconds or any other unit.

    Attributes:
        forward: Time of F, by stage.
        input: Time of I, by stage. B takes I and W together.
        weight: Time of W, by stage.
        transfer: Time of a transfer from stage s to s + 1 or back, by boundary; one fewer than there are
            stages. It counts only if the two are on different ranks.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if not (stages == len(self.input) == len(self.weight) == len(self.transfer) + 1):
            raise PlanError(
                f"times for {stages} forwards, {len(self.input)} input gradients, {len(self.weight)} weight "
                f"gradients and {len(self.transfer)} transfers were given",
                possible="one time of each kind for every stage, and one transfer for every boundary between "
                "stages",
                change="give times for the same number of stages",
            )
        for name, values in (("forward", self.forward), ("input", self.input), ("weight", self.weight)):
            _require_times(name, values)
        _require_times("transfer", self.transfer)

    @classmethod
    def equal(
        cls, stages: int, forward: float = 1, input: float = 1, weight: float = 1, transfer: float = 0
    ) -> Times:
        """Make times that are equal for every stage and boundary."""
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages, (transfer,) * (stages - 1))

    @property
    def stages(self) -> int:
        """Number of stages that the times are for."""
        return len(self.forward)

    def of(self, action: Action) -> float:
        """Return how long an action takes."""
        if action.work is Work.FORWARD:
            return self.forward[action.stage]
        input, weight = self.input[action.stage], self.weight[action.stage]
        return {Work.BACKWARD: input + weight, Work.INPUT: input, Work.WEIGHT: weight}[action.work]


@dataclass(frozen=True, slots=True)
class Played:
    """A schedule with the times at which its actions start and stop.

    Attributes:
        schedule: The schedule that was played.
        times: The times that it was played with.
        starts: By rank, the start of each of its actions; the first starts at 0.
        stops: By rank, the stop of each of its actions.
    """

    schedule: Schedule
    times: Times
    starts: tuple[tuple[float, ...], ...]
    stops: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """The time at which the last action of all stops."""
        return max(stops[-1] for stops in self.stops)

    def busy(self, rank: int) -> float:
        """Return how long the rank works."""
        return math.fsum(map(self.times.of, self.schedule.table[rank]))

    def idle(self, rank: int) -> float:
        """Return how long the rank is idle until the last action of all stops; 0 or more despite rounding."""
        return max(self.makespan - self.busy(rank), 0)

    def stalled(self, rank: int) -> float:
        """Return how long the rank waits between its own first start and its own last stop.

        Papers on zero bubbles count this time: they let each rank begin its next step on its own. If an
        optimizer step ends for all ranks at once, as with the norm of all gradients, `idle` is the loss.
        """
        return max(self.stops[rank][-1] - self.starts[rank][0] - self.busy(rank), 0)

    @property
    def bubble(self) -> float:
        """Idle time as a share of all ranks' time; 0 means no idle time."""
        return sum(map(self.idle, self._ranks)) / (self.makespan * len(self._ranks) or 1)

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over working time: (ranks - 1) / micro-batches for 1F1B with equal stages."""
        return sum(map(self.idle, self._ranks)) / (math.fsum(map(self.busy, self._ranks)) or 1)

    @property
    def peaks(self) -> tuple[float, ...]:
        """By rank, its peak of activations held until B or W, in micro-batches of one stage."""
        return tuple(map(self.schedule.peak_activations, self._ranks))

    @property
    def _ranks(self) -> range:
        return range(self.schedule.ranks)


def play(schedule: Schedule, times: Times) -> Played:
    """Play a schedule: in the table's order, an action starts once its rank is free and its input there.

    Sends and receives overlap with work and do not delay one another.

    Args:
        schedule: The schedule to play.
        times: Times of its stages.

    Raises:
        PlanError: The times are for another number of stages, or the table can never end; the error says
            which action waits for which.
    """
    require_times_of(times, schedule.stages)
    precedence = Precedence.of(schedule.placement, schedule.microbatches, times.transfer)
    durations = precedence.durations(times.forward, times.input, times.weight)
    wholes = [input + weight for input, weight in zip(times.input, times.weight, strict=True)]
    rows = numbered(schedule)
    for row, numbers in zip(schedule.table, rows, strict=True):
        for (work, stage, _), number in zip(row, numbers, strict=True):
            if work is Work.BACKWARD:
                durations[number] = wholes[stage]
    starts, stops, positions = precedence.play(rows, durations)
    if any(position < len(row) for position, row in zip(positions, rows, strict=True)):
        raise PlanError(
            f"the schedule {schedule.name} deadlocks: {precedence.circle(schedule.table, positions)}",
            possible="a table in which every action comes after the actions that it waits for",
            change="correct the order of these actions",
        )
    return Played(
        schedule,
        times,
        tuple(tuple(starts[number] for number in row) for row in rows),
        tuple(tuple(stops[number] for number in row) for row in rows),
    )


def numbered(schedule: Schedule) -> list[list[int]]:
    """Return the table with actions as the numbers of `Precedence`."""
    count = schedule.microbatches
    size = schedule.stages * count
    firsts = {Work.FORWARD: 0, Work.BACKWARD: size, Work.INPUT: size, Work.WEIGHT: 2 * size}
    return [
        [firsts[work] + stage * count + microbatch for work, stage, microbatch in row]
        for row in schedule.table
    ]


def require_times_of(times: Times, stages: int) -> None:
    """Check that times are for this number of stages.

    Raises:
        PlanError: They are for another number.
    """
    if times.stages != stages:
        raise PlanError(
            f"times of {times.stages} stages were given for a schedule of {stages}",
            possible="times of each of the ranks x virtual stages",
            change=f"give times of {stages} stages",
        )


def _require_times(name: str, values: Sequence[float]) -> None:
    for stage, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise PlanError(
                f"the {name} time of stage {stage} is {value}",
                possible="a time is a finite number, 0 or more",
                change="give another time",
            )
