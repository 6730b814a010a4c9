"""The metrics of a run as columns, read once and then only what was appended."""

from __future__ import annotations

import bisect
import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MetricsTail"]

_COLUMNS = (
    *("loss", "validation_loss", "validation_accuracy", "tokens_per_second", "step_seconds"),
    *("gradient_norm", "learning_rate", "tokens"),
)
_CHUNK = 4 << 20
_LONGEST_LINE = 1 << 20


class MetricsTail:
    """Columns of metrics.jsonl; a step that a resumed run repeats replaces the earlier one.

    Args:
        path: The metrics file; it may be absent.

    Attributes:
        unreadable: Whole lines that are not the object of a step; they are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._read = 0
        self._identity: tuple[int, int] | None = None
        self._steps = array("q")
        self._columns = {name: array("d") for name in _COLUMNS}
        self.unreadable = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The steps that have values, ascending."""
        return np.array(self._steps, dtype=np.int64)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return the values of each step; a step without one has NaN."""
        return np.array(self._columns[name], dtype=np.float64)

    def last(self, name: str) -> tuple[int, float] | None:
        """Return the newest step that has a value, and the value."""
        values = self._columns[name]
        for position in range(len(values) - 1, -1, -1):
            if not math.isnan(values[position]):
                return self._steps[position], values[position]
        return None

    def refresh(self) -> bool:
        """Read what was appended; return whether there was anything.

        A torn last line is left for the next time. A file that was replaced or cut is read anew.
        """
        try:
            with self._path.open("rb") as file:
                found = self._path.stat()
                identity = (found.st_dev, found.st_ino)
                if identity != self._identity or found.st_size < self._read:
                    self._forget()
                    self._identity = identity
                before = self._read
                file.seek(before)
                self._take(file)
        except OSError:
            changed = len(self) > 0
            self._forget()
            return changed
        return self._read > before

    def _take(self, file: Any) -> None:
        rest = b""
        while chunk := file.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._read += len(line) + 1
                if line.strip():
                    self._add(line)
            if len(rest) > _LONGEST_LINE:  # no line of a run is so long: drop it, and go on after its end
                self.unreadable += 1
                self._read += len(rest)
                rest = b""

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = values["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            self.unreadable += 1
            return
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            self.unreadable += 1
            return
        position = self._position(step)
        for name, column in self._columns.items():
            if name in values:
                column[position] = _number(values[name])

    def _position(self, step: int) -> int:
        """Return the row of a step, which is made if it is not there."""
        position = len(self._steps)
        if position and step <= self._steps[-1]:
            position = bisect.bisect_left(self._steps, step)
            if self._steps[position] == step:
                return position
        self._steps.insert(position, step)
        for column in self._columns.values():
            column.insert(position, math.nan)
        return position


def _number(value: Any) -> float:
    """Return a value as a float; NaN for what is no number. Infinity stays, as a loss that ran away."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
