"""Peaks of activation memory in a pipeline, as numbers of micro-batches that a rank holds.

A forward adds the activations of its stage and micro-batch, B takes them away. Where a backward is in two
halves, I leaves what W needs, and W takes that away. With rank r of p, v stages on each and m micro-batches:

    gpipe, looped-bfs   all m of each stage
    1f1b, interleaved   those of the first (v - 1) p + 2 (p - 1 - r) + 1 forwards (v = 1: p - r), which go
                        through the stages in rounds of p; after them each forward follows a backward
    zb-h1               p - r, and what W needs of r others
    zb-v                2 p - 1 - r on the way down and r + 1 on the way up; and at another moment, if there
                        are 2 p - r micro-batches, one more on the way down and one less on the way up
    dualpipe-v          2 p - r on the way down and r + 1 on the way up
    search              as many as the search was allowed, spread evenly over the rank's stages

and never more than m of a stage. Tests hold these against the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from shoal.plan.schedules import FOUND

__all__ = ["Held", "activation_peaks"]


class Held(NamedTuple):
    """What a rank holds at some moment, by its stages in ascending order, in micro-batches.

    Attributes:
        whole: All that forward kept.
        halves: What W needs, after I.
    """

    whole: tuple[float, ...]
    halves: tuple[float, ...]


@lru_cache(maxsize=1 << 12)
def activation_peaks(
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
    if schedule == "zb-v":
        return tuple(tuple(_zero_bubble_v(rank, ranks, microbatches)) for rank in range(ranks))
    if schedule == "dualpipe-v":
        return tuple((_v(2 * ranks - rank, rank + 1),) for rank in range(ranks))
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


def _zero_bubble_v(rank: int, ranks: int, microbatches: int) -> Iterator[Held]:
    """Before the first backward; and in the steady state, where a forward down comes before its backward."""
    down, up = 2 * ranks - 1 - rank, rank + 1
    yield _v(min(down, microbatches), min(up, microbatches))
    if microbatches > down:
        yield _v(down + 1, up - 1)


def _v(down: int, up: int) -> Held:
    return Held((float(down), float(up)), (0.0, 0.0))
