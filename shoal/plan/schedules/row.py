"""The actions of one rank, written one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.plan.schedules.action import Action, Work

__all__ = ["Row"]


class Row:
    """Write the actions of a rank whose stages each take the micro-batches in order."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._counts: Counter[tuple[Work, int]] = Counter()
        self._pending: list[tuple[int, int]] = []  # stage and micro-batch where I is done and W is not

    def forwards(self, stage: int) -> int:
        """Return the number of micro-batches that have gone forward through the stage."""
        return self._counts[Work.FORWARD, stage]

    def forward(self, stage: int) -> None:
        """Add F of the stage's next micro-batch."""
        self._add(Work.FORWARD, stage)

    def backward(self, stage: int) -> None:
        """Add B of the stage's next micro-batch."""
        self._counts[Work.INPUT, stage] += 1
        self._add(Work.BACKWARD, stage, self._counts[Work.INPUT, stage] - 1)

    def input(self, stage: int) -> None:
        """Add I of the stage's next micro-batch; its W is pending after this."""
        self._pending.append((stage, self._counts[Work.INPUT, stage]))
        self._add(Work.INPUT, stage)

    def weight(self, stages: Iterable[int]) -> None:
        """Add the oldest pending W of these stages; nothing if there is none."""
        for position, (stage, microbatch) in enumerate(self._pending):
            if stage in stages:
                del self._pending[position]
                self._add(Work.WEIGHT, stage, microbatch)
                return

    def weights(self, stages: Iterable[int]) -> None:
        """Add all pending W of these stages, the oldest first."""
        for _ in range(len(self._pending)):
            self.weight(stages)

    def actions(self, microbatches: int) -> tuple[Action, ...]:
        """Return the written actions, without those of micro-batches beyond the step's number."""
        return tuple(action for action in self._actions if action.microbatch < microbatches)

    def _add(self, work: Work, stage: int, microbatch: int | None = None) -> None:
        if microbatch is None:
            microbatch = self._counts[work, stage]
            self._counts[work, stage] += 1
        self._actions.append(Action(work, stage, microbatch))
