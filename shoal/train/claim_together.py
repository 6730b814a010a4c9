"""Claim a run for a training: the first rank does, and the others wait for it."""

from __future__ import annotations

from collections.abc import Callable

from shoal.checkpoint import Coordinator
from shoal.errors import ShoalError
from shoal.run import Run
from shoal.run.writer import Claiming, Writer

__all__ = ["claim_together"]


def claim_together(
    coordinator: Coordinator, run: Run, say: Callable[[str], object], *, acts: bool
) -> Writer | None:
    """Return the claim, on the rank that acts; all ranks call this together.

    It may take as long as the process that had the run must be silent. Meanwhile the ranks hear of each
    other, so that none waits in one collective for long.

    Args:
        coordinator: The ranks.
        run: The run.
        say: Told, in one line, why this waits.
        acts: Whether this rank claims; at most rank 0 does.

    Raises:
        RunError: On all ranks: another process writes the run.
    """
    claiming = Claiming(run.checkpoints, say, f"the run {run.path}") if acts else None
    outcome: bool | ShoalError = False
    while not outcome:
        try:
            outcome = claiming is None or claiming.poll() is not None
        except ShoalError as error:
            outcome = error
        outcome = coordinator.all_gather_object(outcome)[0]
    if isinstance(outcome, ShoalError):
        raise outcome
    return None if claiming is None else claiming.made
