"""The actions of one rank, written one after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from shoal.plan.schedules.action import Action, Work

_new = tuple.__new__  # makes an Action in half of the time: long pipelines have 100,000


class Row:
    """Write the actions of a rank whose stages each take the micro-batches in order."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._forwards: defaultdict[int, int] = defaultdict(int)  # by stage, its micro-batches so far
        self._backwards: defaultdict[int, int] = defaultdict(int)  # the same of I and B
        self._pending: list[tuple[int, int]] = []  # stage and micro-batch where I is done and W is not

    def forwards(self, stage: int) -> int:
        """Return the number of micro-batches that have gone forward through the stage."""
        return self._forwards[stage]

    def forward(self, stage: int) -> None:
        """Add F of the stage's next micro-batch."""
        microbatch = self._forwards[stage]
        self._forwards[stage] = microbatch + 1
        self._actions.append(_new(Action, (Work.FORWARD, stage, microbatch)))

    def backward(self, stage: int) -> None:
        """Add B of the stage's next micro-batch."""
        self._add(Work.BACKWARD, stage)

    def input(self, stage: int) -> None:
        """Add I of the stage's next micro-batch; its W is pending after this."""
        self._pending.append((stage, self._backwards[stage]))
        self._add(Work.INPUT, stage)

    def weight(self, stages: Iterable[int]) -> None:
        """Add the oldest pending W of these stages; nothing if there is none."""
        for position, (stage, microbatch) in enumerate(self._pending):
            if stage in stages:
                del self._pending[position]
                self._actions.append(_new(Action, (Work.WEIGHT, stage, microbatch)))
                return

    def weights(self, stages: Iterable[int]) -> None:
        """Add all pending W of these stages, the oldest first."""
        for _ in range(len(self._pending)):
            self.weight(stages)

    def actions(self, microbatches: int) -> tuple[Action, ...]:
        """Return the written actions, without those of micro-batches beyond the step's number."""
        return tuple([action for action in self._actions if action[2] < microbatches])

    def _add(self, work: Work, stage: int) -> None:
        """Add I or B of the stage's next micro-batch."""
        microbatch = self._backwards[stage]
        self._backwards[stage] = microbatch + 1
        self._actions.append(_new(Action, (work, stage, microbatch)))
