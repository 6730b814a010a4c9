"""One row of a table of operations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """What a rank did from one time to another, in seconds.

    Attributes:
        rank: The rank.
        step: The step.
        kind: Its kind, in small letters with hyphens.
        start: When it began.
        stop: When it ended.
        stage: The rank's stage.
        dp: The rank's place along dp.
        microbatch: The micro-batch, if the row names one.
        chunk: The virtual stage in the whole model.
    """

    rank: int
    step: int
    kind: str
    start: float
    stop: float
    stage: int
    dp: int
    microbatch: int | None
    chunk: int
