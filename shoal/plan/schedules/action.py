"""One action of a rank: the forward of a stage for a micro-batch, or a part of its backward."""

from __future__ import annotations

import re
from enum import StrEnum
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
