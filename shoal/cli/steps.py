"""The steps that `shoal report --trace FILE --steps FIRST:LAST` is asked for."""

from __future__ import annotations

import argparse

from shoal.errors import RunError, UserError
from shoal.run import Run
from shoal.timeline import Timeline
from shoal.units import parse_steps

__all__ = ["asked_steps", "only_steps"]


def asked_steps(args: argparse.Namespace) -> tuple[int, int] | None:
    """Return the first and the last step of --steps, if it is given.

    Raises:
        UserError: It cannot be read, or there is no --trace.
    """
    if args.steps is None:
        return None
    try:
        steps = parse_steps(args.steps)
    except ValueError as error:
        raise UserError(
            f"--steps {args.steps} was given",
            possible="FIRST:LAST, such as 100:105, or one number",
            change="correct --steps",
        ) from error
    if args.trace is None:
        raise UserError(
            "--steps was given without --trace",
            possible="--trace FILE with --steps",
            change="add --trace FILE, or leave out --steps",
        )
    return steps


def only_steps(steps: tuple[int, int], timeline: Timeline, run: Run) -> Timeline:
    """Return the spans of some steps, from the first start on any rank to the last end."""
    recorded = timeline.steps()
    found = [
        span
        for rank in timeline.ranks
        for index in recorded
        if steps[0] <= index <= steps[1] and (span := timeline.step(rank, index)) is not None
    ]
    if not found:
        among = f"steps {recorded[0]} to {recorded[-1]}, or some of them" if recorded else "none"
        raise RunError(
            f"{run.path} has no recorded step from {steps[0]} to {steps[1]}",
            possible=f"what it recorded: {among}",
            change="give other --steps",
        )
    return timeline.window(min(span.start for span in found), max(span.stop for span in found))
