"""The action that each action waits for, as numbers: the engine of `play` and `search`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.plan.schedules.action import Action, Work

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
