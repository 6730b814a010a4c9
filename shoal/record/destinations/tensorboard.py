"""Scalars for TensorBoard (extra `tensorboard`)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from shoal.errors import MissingExtraError
from shoal.record.logger import Logger

_FLUSH_SECONDS = 1.0


@final
class TensorBoardLogger(Logger):
    """Write scalars for TensorBoard. Raises TensorBoard's errors; `QueuedLogger` keeps these from the run.

    The values of a step are one event, and no other thread writes it: `SummaryWriter.add_scalar` makes an
    event of each value, and takes more than six times the processor time.

    Args:
        directory: Directory of the event files; made at the first value.

    Raises:
        MissingExtraError: The package tensorboard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise MissingExtraError(
                "writing TensorBoard scalars", package="tensorboard", extra="tensorboard"
            ) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._record_writer: Any = RecordWriter
        self._directory = Path(directory)
        self._writer: Any = None
        self._flushed = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        if self._writer is None:
            self._open()
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """See `Logger.close`."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> None:
        """Open a new event file, whose name is of the form that TensorBoard looks for."""
        self._directory.mkdir(parents=True, exist_ok=True)
        now, host = time.time(), socket.gethostname()
        path = self._directory / f"events.out.tfevents.{now:.6f}.{host}.{os.getpid()}"
        self._writer = self._record_writer(path.open("xb"))
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
