"""The metrics file of a run, and several loggers as one."""

from __future__ import annotations

import contextlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, final

from shoal.spec.run.directory import metrics_line


class Logger(ABC):
    """A receiver of the values of steps. One rank has one."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a step, by name; a step may come more than once, with other names."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still buffered."""


class AppendFile:
    """Append lines to a file; the first failure is reported and gives the file up.

    A full disk or a lost mount costs the record, not the training: after the first OSError the file is
    left as it is and later text is dropped.

    Args:
        path: The file; it and its parents are made if absent. If its last line is torn, because an earlier
            process was killed while writing, that line is ended first.
        purpose: What is lost with the file, such as "the timeline"; used in the report.
        say: Called with the report of a failure, one line.
    """

    def __init__(self, path: str | os.PathLike[str], purpose: str, say: Callable[[str], object]) -> None:
        self._path = Path(path)
        self._purpose = purpose
        self._say = say
        self._file: IO[bytes] | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
            self._end_torn_line(self._file)
        except OSError as error:
            self._give_up(error)

    def write(self, text: str) -> None:
        """Append `text`, and pass it to the operating system before returning."""
        if self._file is None:
            return
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file; later text is dropped."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            self._report(error)

    @staticmethod
    def _end_torn_line(file: IO[bytes]) -> None:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            # close() tries to write the buffered text once more, and fails in the same way.
            with contextlib.suppress(OSError):
                file.close()
        self._report(error)

    def _report(self, error: OSError) -> None:
        self._say(f"{self._purpose} is no longer written to {self._path}: {error.strerror or error}")


@final
class MetricsWriter(Logger):
    """Append to the metrics file of a run, one object a call. A file that fails is reported once.

    Args:
        path: The metrics file.
        say: Called with the report, one line.
    """

    def __init__(self, path: str | os.PathLike[str], *, say: Callable[[str], object] = warnings.warn) -> None:
        self._file = AppendFile(path, "the metrics file", say)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._file.write(metrics_line(step, values))

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


@final
class Loggers(Logger):
    """Several loggers as one. A logger that raises is reported once and left out; training goes on.

    Args:
        loggers: The loggers, in the order in which they are called.
        say: Called with the report, one line.
    """

    def __init__(self, loggers: Sequence[Logger], *, say: Callable[[str], object] = warnings.warn) -> None:
        self._loggers = list(loggers)
        self._say = say

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._call(lambda logger: logger.log(step, values))

    def close(self) -> None:
        """See `Logger.close`."""
        self._call(lambda logger: logger.close())

    def _call(self, action: Callable[[Logger], None]) -> None:
        for logger in tuple(self._loggers):
            # A logger may be code of the user: the run survives any error that it raises.
            try:
                action(logger)
            except Exception as error:
                self._loggers.remove(logger)
                self._say(f"{type(logger).__name__} failed and is left out from now on: {error}")
