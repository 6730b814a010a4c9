"""Why a rank is late, and when."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a rank is late."""

    LOADER = "loader"
    """It waits for its input."""
    COPY = "copy"
    """It waits for the copy of its input to the device."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LAUNCH = "launch"
    """Its host gives the device work too slowly."""
    OUTSIDE = "outside"
    """Time of the loop in no span, such as logging or saving, in a step or after it."""
    LINK = "link"
    """Its communication takes longer than that of others, after all have arrived."""
    MACHINE = "machine"
    """All of its compute is slower, or different phases in different steps: a slow clock or a busy core."""
    STAGE = "stage"
    """Its pipeline stage has more work than others; no other rank has this stage for comparison."""


class Pattern(StrEnum):
    """When a rank is late."""

    PERSISTENT = "persistent"
    PERIODIC = "periodic"
    ONCE = "once"
    IRREGULAR = "irregular"


PHASES = (
    *(Cause.LOADER, Cause.COPY, Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER),
    *(Cause.LAUNCH, Cause.OUTSIDE),
)
"""The parts of a rank's own work, in the order of a step."""
