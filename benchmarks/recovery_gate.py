"""A gate before some steps of a training, so that several trainings that are there can run by turns.

`RECOVERY_TURN` is the number of steps of a turn. Before the first step of each a rank writes the seconds of a
step of its last turn into `at-STEP-PROCESS`, and waits for `go-STEP`. Steps count from 0.
"""

import os
import time
from pathlib import Path

__all__ = ["SETTLE", "constant", "pass_gate"]

SETTLE = 4
"""First steps of a turn, which are not timed."""

_FOLDER = Path(os.environ.get("RECOVERY_FOLDER", "."))
_TURN = int(os.environ.get("RECOVERY_TURN", "0"))
_began = 0.0


def pass_gate(step: int) -> None:
    """Wait if a turn begins with this step."""
    global _began
    if not _TURN:
        return
    if step % _TURN == SETTLE:
        _began = time.perf_counter()
    if step % _TURN == 0:
        seconds = (time.perf_counter() - _began) / (_TURN - SETTLE)
        made = _FOLDER / f"made-{step}-{os.getpid()}"
        made.write_text(repr(seconds))
        made.rename(_FOLDER / f"at-{step}-{os.getpid()}")
        while not (_FOLDER / f"go-{step}").exists():
            time.sleep(0.002)


def constant(step: int, steps: int) -> float:
    """Return a constant share of the learning rate; for Shoal, which calls it at the beginning of a step."""
    pass_gate(step)
    return 1.0
