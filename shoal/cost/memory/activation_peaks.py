"""Peaks of activation memory in a pipeline, as numbers of micro-batches that a rank holds.

A forward adds the activations of its stage and micro-batch; the backward B frees them. Where a backward has
two halves, I (gradients of inputs) keeps what W (gradients of weights) needs, and W frees that. For rank r of
p ranks, with v stages on each rank and m micro-batches, a rank holds:

    gpipe, looped-bfs   all m of each stage
    1f1b, interleaved   those of the first (v - 1) p + 2 (p - 1 - r) + 1 forwards (v = 1: p - r), which go
                        through the stages in rounds of p; after them each forward follows a backward
    zb-h1               p - r, and for r others what W needs
    zb-v                2 p - 1 - r on the way down and r + 1 on the way up; and at another moment, if there
                        are 2 p - r micro-batches, one more on the way down and one less on the way up
    dualpipe-v          2 p - r on the way down and r + 1 on the way up
    search              as many as the search was allowed, spread evenly over the rank's stages

A stage never holds more than m. Tests compare these numbers with the schedules' tables.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.plan.schedules import Held, kind_of


@lru_cache(maxsize=1 << 12)
def activation_peaks(
    schedule: str, ranks: int, virtual: int, microbatches: int, limit: int | None = None
) -> tuple[tuple[Held, ...], ...]:
    """Return the candidate peaks of activation memory, by rank.

    Args:
        schedule: Name of the pipeline schedule.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: Micro-batches in a step.
        limit: With schedule=search, the most that a rank may hold, in micro-batches of one stage.
    """
    held = kind_of(schedule).held
    return tuple(held(rank, ranks, virtual, microbatches, limit) for rank in range(ranks))
