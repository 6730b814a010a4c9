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

from functools import lru_cache

from shoal.plan.schedules import Held, kind_of

__all__ = ["activation_peaks"]


@lru_cache(maxsize=1 << 12)
def activation_peaks(
    schedule: str, ranks: int, virtual: int, microbatches: int, limit: int | None = None
) -> tuple[tuple[Held, ...], ...]:
    """Candidate peaks of activation memory, by rank.

    Args:
        schedule: Its name.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: In a step.
        limit: With schedule=search, the most that it may hold, in micro-batches of one stage.
    """
    held = kind_of(schedule).held
    return tuple(held(rank, ranks, virtual, microbatches, limit) for rank in range(ranks))
