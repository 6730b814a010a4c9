"""Low-memory schedules of two stages a rank in a V, which repeat one building block.

Qi et al., arXiv:2405.15362: one micro-batch's actions are laid out once. Each further micro-batch repeats
them six units of time later, since it takes six units of every rank (F, I and W of two stages). If no two
actions of a rank start at equal times modulo six, none collide. A rank then holds as many activations as have
lives that overlap, so a block with short lives holds few: with many ranks, down to a third of what ZB-V
holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shoal.spec.plan.schedules.play import Precedence

_PERIOD = 6
_MOST_STEP = 3


@dataclass(frozen=True, slots=True)
class Block:
    """The start times of the first micro-batch's actions, in units of one action.

    Attributes:
        starts: Start times, by kind (F, I, W) and stage.
        lives: By rank, the sum of the lives of its two activations.
    """

    starts: tuple[tuple[int, ...], ...]
    lives: tuple[int, ...]

    @property
    def least_peak(self) -> int:
        """Return a lower bound on the activations that some rank holds at once, with many micro-batches."""
        return -(-max(self.lives) // _PERIOD)

    @property
    def length(self) -> int:
        """Return the time that the first micro-batch takes."""
        return max(map(max, self.starts)) + 1

    def rows(self, precedence: Precedence) -> list[list[int]]:
        """Return, by rank, the numbers of all micro-batches' actions in the order of their starts."""
        microbatches, size = precedence.microbatches, precedence.size
        timed: list[list[tuple[int, int]]] = [[] for _ in self.lives]
        for kind, starts in enumerate(self.starts):
            for stage, start in enumerate(starts):
                first = kind * size + stage * microbatches
                timed[precedence.placement[stage]] += [
                    (start + _PERIOD * microbatch, first + microbatch) for microbatch in range(microbatches)
                ]
        return [[number for _, number in sorted(row)] for row in timed]


def blocks(ranks: int) -> Iterator[Block]:
    """Yield all blocks in which each of the four passes over the ranks takes one step, 1 to 3 units, a rank.

    The passes are F down the ranks and up, then I down and up; the turn between two takes 1 to 6 units. W
    takes the two remaining times of the six, as early as possible.
    """
    last = ranks - 1
    steps, turns = range(1, _MOST_STEP + 1), range(1, _PERIOD + 1)
    for down in steps:
        first = [rank * down for rank in range(ranks)]
        for up, turn in product(steps, turns):
            second = [first[last] + turn + (last - rank) * up for rank in range(ranks)]
            if _collide(first, second):
                continue
            for back_down, turn_back in product(steps, turns):
                third = [second[0] + turn_back + rank * back_down for rank in range(ranks)]
                if _collide(first, third) or _collide(second, third):
                    continue
                for back_up, last_turn in product(steps, turns):
                    fourth = [third[last] + last_turn + (last - rank) * back_up for rank in range(ranks)]
                    if not any(_collide(other, fourth) for other in (first, second, third)):
                        yield _block(first, second, third, fourth)


def _collide(one: list[int], other: list[int]) -> bool:
    """Return whether the two are at one time of the period on some rank."""
    return any((a - b) % _PERIOD == 0 for a, b in zip(one, other, strict=True))


def _block(first: list[int], second: list[int], third: list[int], fourth: list[int]) -> Block:
    """Return the block of these starts, by rank, of F of both stages and of I of the second and the first."""
    weights: list[tuple[int, int]] = []
    for times in zip(first, second, third, fourth, strict=True):
        one, other = set(range(_PERIOD)) - {time % _PERIOD for time in times}
        weights.append(
            min(
                (
                    (_next(times[3], one), _next(times[2], other)),
                    (_next(times[3], other), _next(times[2], one)),
                ),
                key=sum,
            )
        )
    return Block(
        starts=(
            (*first, *reversed(second)),
            (*fourth, *reversed(third)),
            (*(early for early, _ in weights), *(late for _, late in reversed(weights))),
        ),
        lives=tuple(
            early - forward + late - other + 2
            for (early, late), forward, other in zip(weights, first, second, strict=True)
        ),
    )


def _next(time: int, residue: int) -> int:
    """Return the first time after an action at `time` that is `residue` modulo the period."""
    return time + 1 + (residue - time - 1) % _PERIOD
