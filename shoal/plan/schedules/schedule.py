"""The Schedule: the actions of each rank in order, as one table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shoal.plan.schedules.action import Action, Work


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
