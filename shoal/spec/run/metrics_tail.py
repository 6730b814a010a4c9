"""The metrics of a run as columns, read once and then only what was appended.

A large file is sampled first: lines at even distances, found without those between them. So a page of a
million steps has something to show at once, and everything after the next look.

Reads files of a run while they are written: complete lines only, in bounded memory.

A writer appends whole lines, but a reader may see half of the last one. It is read when the rest is there. A
file that became shorter, or that another file has replaced, is read from its beginning.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
from array import array
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from shoal.limits import open_regular
from shoal.spec.run.account import Account, Ledger, parse_events
from shoal.spec.run.directory import NOT_FINITE, Run

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_AT_ONCE = 4 << 20
"""Bytes that are read at once."""
_LONGEST_LINE = 1 << 20
"""Bytes of a line from which on its beginning is dropped."""


@final
class FileTail:
    """Read what was appended to a file since the last time.

    Args:
        path: The file; it may not be there yet.
        forget: Function that is called before the file is read from its beginning.
        at_once: Bytes to read at once.

    Attributes:
        position: Bytes of the file that were read, to the end of a line.
    """

    def __init__(
        self, path: Path, forget: Callable[[], None] = lambda: None, at_once: int = _AT_ONCE
    ) -> None:
        self._path = path
        self._forget = forget
        self._at_once = at_once
        self._identity: tuple[int, int] | None = None
        self.position = 0

    def size(self) -> int:
        """Return the bytes of the file, 0 without one; see whether it is still the same file."""
        identity, size = None, 0
        with contextlib.suppress(OSError):
            status = self._path.stat()
            identity, size = (status.st_dev, status.st_ino), status.st_size
        if identity != self._identity or size < self.position:
            self._identity, self.position = identity, 0
            self._forget()
        return size

    def chunks(self) -> Iterator[list[bytes]]:
        """Yield the lines that were completed since the last call, many at once."""
        if self.size() == self.position:
            return
        with contextlib.suppress(OSError), open_regular(self._path) as file:
            file.seek(self.position)
            rest = b""
            while chunk := file.read(self._at_once):
                *lines, rest = (rest + chunk).split(b"\n")
                self.position += sum(map(len, lines)) + len(lines)
                if len(rest) > _LONGEST_LINE:
                    self.position += len(rest)
                    rest = b""
                if lines:
                    yield lines


@final
class FollowedAccount:
    """Follow the events of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._files = [FileTail(run.events_file), FileTail(run.members_file)]
        self._ledger = Ledger()

    def look(self) -> Account | None:
        """Read what is new, and return the account; None for a run without events."""
        new = [line for file in self._files for lines in file.chunks() for line in lines]
        for event in parse_events(line.decode(errors="replace") for line in new):
            self._ledger.take(event)
        return self._ledger.account()


_COLUMNS = (
    *("loss", "validation_loss", "validation_accuracy", "tokens_per_second", "step_seconds"),
    *("gradient_norm", "learning_rate", "tokens"),
)
_LARGE = 16 << 20
"""Bytes from which a file is sampled before it is read."""
_SAMPLES = 2000
_LAST_STEP = 1 << 53


@final
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
        self._file = FileTail(path, self._forget)
        self._forget()

    def _forget(self) -> None:
        self._steps = array("q")
        self._columns = {name: array("d") for name in _COLUMNS}
        self._not_numbers: set[tuple[str, int]] = set()  # names and steps whose value is "NaN"
        self._newest: dict[str, Any] = {}
        self.unreadable = 0
        self.is_sample = False

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The steps that have values, ascending."""
        import numpy as np  # here, so that a prediction starts without it

        return np.array(self._steps, dtype=np.int64)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return the values of each step; a step without one has NaN."""
        import numpy as np

        return np.array(self._columns[name], dtype=np.float64)

    def last(self, name: str) -> tuple[int, float] | None:
        """Return the newest step that has a value, and the value."""
        import numpy as np

        values = self.column(name)
        known = np.flatnonzero(~np.isnan(values))
        return (self._steps[known[-1]], float(values[known[-1]])) if len(known) else None

    def curve(self, name: str) -> list[float]:
        """Return the values that steps have, in order of steps; NaN where one is not a number."""
        import numpy as np

        values = self.column(name)
        diverged = [step for each, step in self._not_numbers if each == name]
        curve: list[float] = values[~np.isnan(values) | np.isin(self.steps, diverged)].tolist()
        return curve

    @property
    def values(self) -> dict[str, float]:
        """The newest value of each name in the file, with "step"; empty before the first."""
        shown = {name: _shown(value) for name, value in self._newest.items()}
        steps = {"step": self._newest["step"]} if self._newest else {}
        return {name: value for name, value in shown.items() if value is not None} | steps

    def refresh(self) -> bool:
        """Read what was appended; return whether there was anything.

        A torn last line is left for the next time. A file that was replaced or cut is read anew.
        """
        before = self._file.position
        if self._file.size() > _LARGE and not self._file.position and not self.is_sample:
            self._sample()
            return True
        if self.is_sample:
            self._forget()
        has_grown = False
        for lines in self._file.chunks():
            has_grown = True
            if not self._add_all(lines):
                for line in lines:
                    if line.strip():
                        self._add(line)
        return has_grown or self._file.position < before

    def _sample(self) -> None:
        """Read lines at even distances, and the last ones."""
        size = self._file.size()
        with contextlib.suppress(OSError), BufferedReader(open_regular(self._path)) as file:
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
        for values in objects:
            self._newest.update(values)
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
        self._newest.update(values)
        position = self._position(step)
        for name, column in self._columns.items():
            if name in values:
                column[position] = _number(values[name])
                change = self._not_numbers.add if values[name] == "NaN" else self._not_numbers.discard
                change((name, step))

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


def _shown(value: Any) -> float | None:
    """Return a number of the file, also one that is not finite; None for anything else."""
    if isinstance(value, str):
        return NOT_FINITE.get(value)
    return _number(value) if isinstance(value, int | float) else None
