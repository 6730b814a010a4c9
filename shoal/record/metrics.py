"""Loggers: receivers of the values of a step, such as its loss."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

from shoal.errors import MissingExtraError
from shoal.record.append import AppendFile
from shoal.run.metrics import metrics_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Logger", "Loggers", "MetricsWriter", "TensorBoardLogger"]


class Logger(ABC):
    """A receiver of the values of steps. One rank has one."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a step, by name; a step may come more than once, with other names."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still buffered."""


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
class TensorBoardLogger(Logger):
    """Write scalars for TensorBoard. Raises TensorBoard's errors; `Loggers` keeps these from the run.

    Args:
        directory: Directory of the event files; made at the first value.

    Raises:
        MissingExtraError: The package tensorboard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                "writing TensorBoard scalars", package="tensorboard", extra="tensorboard"
            ) from error
        self._make_writer = lambda: SummaryWriter(os.fspath(directory))
        self._writer: SummaryWriter | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        if self._writer is None:
            self._writer = self._make_writer()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Logger.close`."""
        if self._writer is not None:
            self._writer.close()


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
