"""Play a schedule with given times: when each action starts and stops, and how long ranks are idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.spec.plan.schedules.schedule import Action, Schedule, Work

_KIND = {Work.FORWARD: 0, Work.BACKWARD: 1, Work.INPUT: 1, Work.WEIGHT: 2}


def awaited_actions(stages: int, microbatches: int) -> list[int]:
    """Return, by number of an action (see `Precedence`), the one that it waits for; below 0 for none."""
    size = stages * microbatches
    return [
        *range(-microbatches, size - microbatches),
        *range(size + microbatches, 2 * size),
        *range(size - microbatches, size),
        *range(size, 2 * size),
    ]


@dataclass(frozen=True, slots=True)
class Precedence:
    """The actions of a pipeline, each with the one that it waits for.

    An action has the number `kind x size + stage x microbatches + microbatch`, where kind is 0 for F, 1 for I
    or B, 2 for W, and size is stages x microbatches. F waits for F of the previous stage. I and B wait for
    the gradient of the next stage, or in the last stage for their own F. W waits for its own I.

    Attributes:
        placement: By stage, the rank that holds it.
        microbatches: Micro-batches of a step.
        awaited: By action, the number of the one that it waits for; below 0 for none.
        delay: By action, the transfer time of what it waits for.
    """

    placement: tuple[int, ...]
    microbatches: int
    awaited: list[int]
    delay: list[float]

    @classmethod
    def of(cls, placement: tuple[int, ...], microbatches: int, transfer: Sequence[float]) -> Precedence:
        """Return the precedence of a pipeline. `transfer` is by boundary; it counts between two ranks."""
        crossing = [
            seconds if placement[stage] != placement[stage + 1] else 0
            for stage, seconds in enumerate(transfer)
        ]
        delay = [
            *(seconds for seconds in (0, *crossing) for _ in range(microbatches)),
            *(seconds for seconds in (*crossing, 0) for _ in range(microbatches)),
            *(0 for _ in range(len(placement) * microbatches)),
        ]
        return cls(placement, microbatches, awaited_actions(len(placement), microbatches), delay)

    @property
    def size(self) -> int:
        """Number of actions of one kind: stages x micro-batches."""
        return len(self.placement) * self.microbatches

    def number(self, action: Action) -> int:
        """Return the action's number; I and B share one."""
        return _KIND[action.work] * self.size + action.stage * self.microbatches + action.microbatch

    def action(self, number: int) -> Action:
        """Return the action with a number; I if I and B share it."""
        kind, rest = divmod(number, self.size)
        return Action((Work.FORWARD, Work.INPUT, Work.WEIGHT)[kind], *divmod(rest, self.microbatches))

    def durations(
        self, forward: Sequence[float], input: Sequence[float], weight: Sequence[float]
    ) -> list[float]:
        """Return the time of each action, given the times of F, I and W by stage."""
        return [
            seconds for kind in (forward, input, weight) for seconds in kind for _ in range(self.microbatches)
        ]

    def play(
        self, rows: Sequence[Sequence[int]], durations: Sequence[float]
    ) -> tuple[list[float], list[float], list[int]]:
        """Run the actions, each once its rank has come to it and what it waits for has arrived.

        Args:
            rows: By rank, the numbers of its actions.
            durations: Time of each action.

        Returns:
            By action, its start and its stop, -1 for one that never ran; by rank, the number of actions that
            ran.
        """
        starts: list[float] = [-1] * len(durations)
        stops: list[float] = [-1] * len(durations)
        positions = [0] * len(rows)
        free: list[float] = [0] * len(rows)
        waiting: dict[int, list[int]] = {}
        awaited, delay = self.awaited, self.delay
        able = list(range(len(rows)))
        while able:
            rank = able.pop()
            row, now = rows[rank], free[rank]
            position = positions[rank]
            while position < len(row):
                number = row[position]
                before = awaited[number]
                if before >= 0:
                    if stops[before] < 0:
                        waiting.setdefault(before, []).append(rank)
                        break
                    now = max(now, stops[before] + delay[number])
                starts[number] = now
                now += durations[number]
                stops[number] = now
                position += 1
                if number in waiting:
                    able += waiting.pop(number)
            positions[rank], free[rank] = position, now
        return starts, stops, positions

    def circle(self, table: Sequence[Sequence[Action]], positions: Sequence[int]) -> str:
        """Return which action waits for which, in a table that stops for good at these positions."""
        ahead = {
            self.number(action): (rank, action)
            for rank, row in enumerate(table)
            for action in row[positions[rank] :]
        }
        rank = next(rank for rank, row in enumerate(table) if positions[rank] < len(row))
        at: dict[int, int] = {}
        told: list[str] = []
        while rank not in at:
            at[rank] = len(told)
            action = table[rank][positions[rank]]
            awaited = self.awaited[self.number(action)]
            if awaited not in ahead:
                return f"rank {rank} waits at {action} for {self.action(awaited)}, which is on no rank"
            holder, found = ahead[awaited]
            blocking = table[holder][positions[holder]]
            told.append(
                f"rank {rank} waits at {action} for {found}, which comes after {blocking} on rank {holder}"
            )
            rank = holder
        return "; ".join(told[at[rank] :])


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
