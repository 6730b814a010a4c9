"""The metrics of a run as columns, read once and then only what was appended.

A large file is sampled first: lines at even distances, found without those between them. So a page of a
million steps has something to show at once, and everything after the next look.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from array import array
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.limits import open_regular

__all__ = ["MetricsTail"]

_COLUMNS = (
    *("loss", "validation_loss", "validation_accuracy", "tokens_per_second", "step_seconds"),
    *("gradient_norm", "learning_rate", "tokens"),
)
_CHUNK = 4 << 20
_LONGEST_LINE = 1 << 20
_LARGE = 16 << 20
"""Bytes from which a file is sampled before it is read."""
_SAMPLES = 2000
_LAST_STEP = 1 << 53


class MetricsTail:
    """Columns of metrics.jsonl; a step that a resumed run repeats replaces the earlier one.

    Args:
        path: The metrics file; it may be absent.

    Attributes:
        unreadable: Whole lines that are not the object of a step; they are left out.
        is_sample: Whether the columns are a sample of a large file, which is read next time.
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
        self.is_sample = False

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
        values = self.column(name)
        known = np.flatnonzero(~np.isnan(values))
        return (self._steps[known[-1]], float(values[known[-1]])) if len(known) else None

    def refresh(self) -> bool:
        """Read what was appended; return whether there was anything.

        A torn last line is left for the next time. A file that was replaced or cut is read anew.
        """
        try:
            with BufferedReader(open_regular(self._path)) as file:
                found = self._path.stat()
                identity = (found.st_dev, found.st_ino)
                if self.is_sample or identity != self._identity or found.st_size < self._read:
                    is_new = identity != self._identity
                    self._forget()
                    self._identity = identity
                    if is_new and found.st_size > _LARGE:
                        self._sample(file, found.st_size)
                        return True
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
            if not self._add_all(lines):
                for line in lines:
                    if line.strip():
                        self._add(line)
            self._read += sum(map(len, lines)) + len(lines)
            if len(rest) > _LONGEST_LINE:  # no line of a run is so long: drop it, and go on after its end
                self.unreadable += 1
                self._read += len(rest)
                rest = b""

    def _sample(self, file: Any, size: int) -> None:
        """Read lines at even distances, and the last ones."""
        for number in range(_SAMPLES):
            file.seek(number * (size // _SAMPLES))
            file.readline(_LONGEST_LINE)
            self._add(file.readline(_LONGEST_LINE))
        file.seek(size - (1 << 16))
        for line in file.read(1 << 16).split(b"\n")[1:-1]:
            self._add(line)
        self.unreadable = 0
        self.is_sample = True

    def _add_all(self, lines: list[bytes]) -> bool:
        """Add lines of which each is a new step; return False, and add none, if there is any other line.

        It parses all in one call, which takes a third of the time.
        """
        try:
            objects = json.loads(b"[" + b",".join(lines) + b"]")
            steps = array("q", [values["step"] for values in objects])
            added = {
                name: array("d", [values.get(name, math.nan) for values in objects]) for name in self._columns
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return False
        last = self._steps[-1] if self._steps else -1
        ascending = all(a < b for a, b in itertools.pairwise([last, *steps, _LAST_STEP]))
        if len(objects) != len(lines) or not ascending:
            return False
        self._steps.extend(steps)
        for name, column in added.items():
            self._columns[name].extend(column)
        return True

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = values["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            self.unreadable += 1
            return
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _LAST_STEP:
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
