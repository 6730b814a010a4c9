"""The metrics file of a run, and several loggers as one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import final

from shoal.record.append import AppendFile
from shoal.record.logger import Logger
from shoal.run.metrics import metrics_line


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
