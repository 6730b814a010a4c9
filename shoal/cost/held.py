"""Of how many micro-batches a pipeline's ranks hold activations when they hold most.

A forward adds the activations of its stage and micro-batch, B takes them away. Where a backward is in two
halves, I leaves what W needs, and W takes that away. With rank r of p, v stages on each and m micro-batches:

    gpipe, looped-bfs   all m of each stage
    1f1b, interleaved   those of the first (v - 1) p + 2 (p - 1 - r) + 1 forwards (v = 1: p - r), which go
                        through the stages in rounds of p; after them each forward follows a backward
    zb-h1               p - r, and what W needs of r others
    search              as many as the search was allowed, spread evenly over the rank's stages
    zb-v, dualpipe-v    what their tables say; beyond 3 p micro-batches these repeat themselves

Tests hold the closed forms against the tables.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.plan.schedules import FOUND, Schedule, Work, make

__all__ = ["Held", "held_by_rank"]

_STEADY = 3  # micro-batches a rank, from which on a zero-bubble table holds no more


class Held(NamedTuple):
    """What a rank holds at some moment, by its stages in ascending order, in micro-batches.

    Attributes:
        whole: All that forward kept.
        halves: What W needs, after I.
    """

    whole: tuple[float, ...]
    halves: tuple[float, ...]


@lru_cache(maxsize=1 << 12)
def held_by_rank(
    schedule: str, ranks: int, virtual: int, microbatches: int, limit: int | None = None
) -> tuple[tuple[Held, ...], ...]:
    """By rank, the moments after forwards at which nothing else is held by more.

    Args:
        schedule: Its name.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: In a step.
        limit: With schedule=search, the most that it may hold, in micro-batches of one stage.
    """
    if schedule in ("zb-v", "dualpipe-v"):
        if microbatches > _STEADY * ranks:
            return held_by_rank(schedule, ranks, virtual, _STEADY * ranks)
        table = make(schedule, ranks, virtual, microbatches)
        return tuple(_read(table, rank) for rank in range(ranks))
    none = (0.0,) * virtual
    if schedule in ("gpipe", "looped-bfs"):
        return ((Held((float(microbatches),) * virtual, none),),) * ranks
    if schedule == FOUND:
        most = min(ranks * virtual if limit is None else limit, microbatches * virtual)
        return ((Held((most / virtual,) * virtual, none),),) * ranks
    if schedule == "zb-h1":
        return tuple((_zero_bubble_1(rank, ranks, microbatches),) for rank in range(ranks))
    return tuple((Held(_first_forwards(rank, ranks, virtual, microbatches), none),) for rank in range(ranks))


def _first_forwards(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[float, ...]:
    """How many of the forwards before the first backward, and the one that it follows, are of each stage."""
    first = ranks - 1 - rank if virtual == 1 else (virtual - 1) * ranks + 2 * (ranks - 1 - rank)
    rounds, rest = divmod(min(first + 1, microbatches * virtual), ranks * virtual)
    return tuple(float(rounds * ranks + min(max(rest - turn * ranks, 0), ranks)) for turn in range(virtual))


def _zero_bubble_1(rank: int, ranks: int, microbatches: int) -> Held:
    ahead = min(ranks - 1 - rank, microbatches)
    whole = min(ranks - rank, microbatches)
    return Held((float(whole),), (float(min(rank, max(0, microbatches - 1 - ahead))),))


def _read(table: Schedule, rank: int) -> tuple[Held, ...]:
    """The moments of a rank's row of which none holds at least as much of everything as another."""
    stages = table.stages_of(rank)
    whole, halves = dict.fromkeys(stages, 0.0), dict.fromkeys(stages, 0.0)
    moments: set[Held] = set()
    for action in table.table[rank]:
        stage = action.stage
        if action.work is Work.FORWARD:
            whole[stage] += 1
            moments.add(Held(tuple(whole.values()), tuple(halves.values())))
        elif action.work is Work.BACKWARD:
            whole[stage] -= 1
        elif action.work is Work.INPUT:
            whole[stage] -= 1
            halves[stage] += 1
        else:
            halves[stage] -= 1
    return tuple(moment for moment in moments if not any(_covers(other, moment) for other in moments))


def _covers(one: Held, other: Held) -> bool:
    """Whether one holds at least as much of everything, and is another."""
    return one != other and all(
        more >= less
        for many, few in zip(one, other, strict=True)
        for more, less in zip(many, few, strict=True)
    )
