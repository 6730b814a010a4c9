"""A kind of schedule: its table, its limits on numbers, its activations and its bubble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import PlanError
from shoal.plan.schedules.action import Action
from shoal.plan.schedules.schedule import looped, v_shaped


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
            in `shoal.cost.memory.activation_peaks`.
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
