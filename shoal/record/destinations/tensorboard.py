"""Scalars for TensorBoard (extra `tensorboard`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from shoal.errors import MissingExtraError
from shoal.record.logger import Logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLogger"]


@final
class TensorBoardLogger(Logger):
    """Write scalars for TensorBoard. Raises TensorBoard's errors; `QueuedLogger` keeps these from the run.

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
