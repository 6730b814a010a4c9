"""What a step costs more while nothing fails, with what allows recovery; a part of recovery.py.

Trainings with and without it are there at the same time and run by turns, as recovery_gate.py says: those
whose turn it is not are stopped, with their launchers and lighthouse.
"""

from __future__ import annotations

import math
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from recovery_contestants import CONTESTANTS, PLAIN, Contestant, Task, Training

__all__ = ["cost_table", "spread"]

_WAKE = 1.0  # seconds for launchers and heartbeats to come round


def cost_table(
    model: str, rounds: int, seconds: float, names: list[str], say: Callable[[str], object]
) -> list[str]:
    """Return the rows of the table of steady costs.

    Args:
        model: A preset.
        rounds: Turns of each training.
        seconds: Of a turn, about.
        names: Contestants that may be measured.
        say: Told how far it is.
    """
    chosen = [each for each in CONTESTANTS if each.name in names and each.without]
    needed = [each for each in PLAIN if any(each.name == one.without for one in chosen)]
    found = _measured(Task(model, 0), [*needed, *chosen], rounds, seconds, say)
    rows = ["| | step, ms | over | ratio |", "| --- | ---: | --- | ---: |"]
    for each in [*needed, *chosen]:
        turns, over = found[each.name], found[each.without] if each.without else []
        ratio = _ratio([on / off for on, off in zip(turns, over, strict=True)]) if over else ""
        rows.append(f"| {each.name} | {spread([1e3 * turn for turn in turns])} | {each.without} | {ratio} |")
    return rows


def spread(values: list[float], digits: int = 2) -> str:
    """Return the median and the range."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _ratio(values: list[float]) -> str:
    """Return the median with its range, and with the interval that has the true one in 95 % of cases."""
    ordered = sorted(values)
    # The number of values below the true median is binomial with one half.
    low = round(len(values) / 2 - 0.98 * math.sqrt(len(values))) - 1
    if low < 0:
        return spread(values, 3)
    return f"{spread(values, 3)}, 95 % sure {ordered[low]:.3f} to {ordered[-1 - low]:.3f}"


def _measured(
    task: Task, contestants: list[Contestant], rounds: int, seconds: float, say: Callable[[str], object]
) -> dict[str, list[float]]:
    """Return the seconds of a step in each turn, by contestant."""
    found: dict[str, list[float]] = {each.name: [] for each in contestants}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        task = replace(task, turn=_turn(task, contestants[0], seconds, Path(name)))
        trainings = []
        for number, contestant in enumerate(contestants):
            folder = Path(name) / str(number)
            folder.mkdir()
            training = stack.enter_context(Training(contestant, task, folder))
            _arrive(training, 0)
            training.signal(signal.SIGSTOP)
            trainings.append(training)
        for turn in range(rounds + 1):  # the first one is not counted
            say(f"{task.model}: steady cost, turn {turn} of {rounds}")
            for training in trainings[:: -1 if turn % 2 else 1]:
                training.signal(signal.SIGCONT)
                time.sleep(_WAKE)
                (training.folder / f"go-{turn * task.turn}").touch()
                took = _arrive(training, (turn + 1) * task.turn)
                training.signal(signal.SIGSTOP)
                if turn:
                    found[training.contestant.name].append(took)
    return found


def _turn(task: Task, contestant: Contestant, seconds: float, folder: Path) -> int:
    """Return the number of steps of a turn that takes about these seconds."""
    trial = folder / "trial"
    trial.mkdir()
    with Training(contestant, replace(task, turn=40), trial) as training:
        _arrive(training, 0)
        (trial / "go-0").touch()
        return max(20, round(seconds / _arrive(training, 40)))


def _arrive(training: Training, step: int) -> float:
    """Wait until both ranks are at the gate before a step; return the seconds of a step in the last turn."""
    paths: list[Path] = []

    def are_there() -> bool:
        paths[:] = training.folder.glob(f"at-{step}-*")
        return len(paths) == 2

    training.wait(are_there, f"both ranks are before step {step}")
    return fmean(float(path.read_text()) for path in paths)
