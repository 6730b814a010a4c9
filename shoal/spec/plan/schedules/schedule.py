"""The Schedule: the actions of each rank in order, as one table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from shoal.errors import PlanError

_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class Work(StrEnum):
    """A kind of work. A stage and micro-batch has F and either B, or I and later W."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: I and W in one."""
    INPUT = "I"
    """The gradient of the stage's input, for which the previous stage waits."""
    WEIGHT = "W"
    """The gradient of the stage's weights, for which no stage waits."""


class Action(NamedTuple):
    """One piece of work. Its text form is torch's: `2F3` is the forward of stage 2 for micro-batch 3.

    Attributes:
        work: Kind of the work.
        stage: Number of the stage in the whole pipeline, from 0.
        microbatch: Number of the micro-batch in the step, from 0.
    """

    work: Work
    stage: int
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            PlanError: The text is not an action's.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"{text!r} is not an action of a schedule",
                possible="a stage, one of F, B, I and W, and a micro-batch, such as 2F3",
                change="correct or leave out that action",
            )
        return cls(Work(match[2]), int(match[1]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The table of one step of a pipeline. `require_sound` checks a table that was not made by `make`.

    Attributes:
        name: One of `NAMES`, or the name of its maker.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: Micro-batches in a step.
        placement: By stage, the rank that holds it.
        table: By rank, its actions in the order in which it does them.
    """

    name: str
    ranks: int
    virtual: int
    microbatches: int
    placement: tuple[int, ...]
    table: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages: ranks x virtual."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    @property
    def held_by_stage(self) -> tuple[int, ...]:
        """By stage, the micro-batches whose activations it holds when its rank holds the most in total."""
        held = [0] * self.stages
        for rank, row in enumerate(self.table):
            now = dict.fromkeys(self.stages_of(rank), 0)
            most = 0
            for action in row:
                if action.work is not Work.INPUT:
                    now[action.stage] += 1 if action.work is Work.FORWARD else -1
                if (total := sum(now.values())) > most:
                    most = total
                    for stage, count in now.items():
                        held[stage] = count
        return tuple(held)

    def peak_activations(self, rank: int, kept: float = 1.0) -> float:
        """Return the most activations that a rank holds at once, in micro-batches of one stage.

        Divided by `virtual` it is in micro-batches of all the layers of the rank, as papers count. An
        activation is held from F to B. If the backward is in two halves, I frees the share `1 - kept` of it
        and W the rest.

        Args:
            rank: The rank.
            kept: Share that W still needs after I: 1 holds everything until W, 0 only until I.
        """
        change = {Work.FORWARD: 1.0, Work.BACKWARD: -1.0, Work.INPUT: kept - 1.0, Work.WEIGHT: -kept}
        held = peak = 0.0
        for action in self.table[rank]:
            held += change[action.work]
            peak = max(peak, held)
        return peak


@lru_cache(maxsize=1 << 10)
def looped(ranks: int, virtual: int) -> tuple[int, ...]:
    """Return the placement that goes round the ranks `virtual` times: stage s on rank s mod ranks."""
    return tuple(range(ranks)) * virtual


@lru_cache(maxsize=1 << 8)
def v_shaped(ranks: int) -> tuple[int, ...]:
    """Return the placement of two stages a rank, down the ranks and up: rank 0 has the last stage."""
    return (*range(ranks), *reversed(range(ranks)))


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


class Held(NamedTuple):
    """The activations that a rank holds at one time, by its stages in ascending order, in micro-batches.

    Attributes:
        whole: Micro-batches of which all that forward kept is held.
        halves: Micro-batches of which only what W needs is held, after I.
    """

    whole: tuple[float, ...]
    halves: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Kind:
    """A kind of schedule. `KINDS` has one object for each.

    Attributes:
        name: The value of a Plan's `schedule`.
        row: Makes the actions of a rank from rank, ranks, virtual stages and micro-batches; None if the
            schedule is found by search.
        held: Returns the candidate peaks of a rank's activations from rank, ranks, virtual stages,
            micro-batches and the limit of a search, which is in micro-batches of one stage. The formulas are
            in `shoal.predict.cost.memory.memory`.
        least_virtual: Fewest stages on a rank.
        most_virtual: Most stages on a rank; None if there is no limit.
        v_of: Number of stages on a rank with which these go down the ranks and up again; None if they never
            do.
        microbatches_per_rank: Least ratio of micro-batches to ranks; 0 if there is none.
        in_rounds: Whether the micro-batches must be a multiple of the ranks.
        has_halves: Whether a backward may be in two halves, I and W.
    """

    name: str
    row: Callable[[int, int, int, int], tuple[Action, ...]] | None
    held: Callable[[int, int, int, int, int | None], tuple[Held, ...]]
    least_virtual: int = 1
    most_virtual: int | None = 1
    v_of: int | None = None
    microbatches_per_rank: int = 0
    in_rounds: bool = False
    has_halves: bool = False

    @property
    def usual_virtual(self) -> int:
        """Return the stages on a rank to show the schedule with by default: two if it takes any number."""
        return 2 if self.most_virtual is None else self.least_virtual

    def takes_virtual(self, virtual: int) -> bool:
        """Whether the schedule can be made for so many stages on a rank."""
        return self.least_virtual <= virtual and (self.most_virtual is None or virtual <= self.most_virtual)

    def takes(self, ranks: int, virtual: int, microbatches: int) -> bool:
        """Return whether the schedule can be made for these numbers, each 1 or more."""
        return (
            self.takes_virtual(virtual)
            and microbatches >= self.microbatches_per_rank * ranks
            and not (self.in_rounds and microbatches % ranks)
        )

    def placement(self, ranks: int, virtual: int) -> tuple[int, ...]:
        """Return, by stage, the rank that holds it, for any number of micro-batches: a model is cut once."""
        return v_shaped(ranks) if self.v_of == virtual else looped(ranks, virtual)

    def require_microbatches(self, ranks: int, microbatches: int) -> None:
        """Check the number of micro-batches of a step.

        Raises:
            PlanError: The schedule cannot be made for this many on this many ranks.
        """
        given = f"the schedule {self.name} was asked for with {microbatches} micro-batches on {ranks} ranks"
        least = self.microbatches_per_rank * ranks
        if microbatches < least:
            raise PlanError(
                given,
                possible=f"{least} micro-batches or more: {self.microbatches_per_rank} for each rank",
                change=f"give {least} micro-batches, or choose another schedule",
            )
        if self.in_rounds and microbatches % ranks:
            lower, upper = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
            fitting = f"{lower} or {upper}" if lower else f"{upper}"
            raise PlanError(
                given,
                possible=f"a multiple of {ranks}",
                change=f"give {fitting}, or choose another schedule",
            )
