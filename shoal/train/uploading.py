"""Copies each checkpoint that is saved to an object store, behind the training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import final

from shoal.checkpoint import Store
from shoal.errors import CheckpointError, RunError
from shoal.run.writer import claimed
from shoal.train.config import CheckpointConfig

__all__ = ["Uploading"]


@final
class Uploading:
    """Copy checkpoints in a thread, one at a time.

    Of those that are saved while one is copied, only the newest is copied after it. A failure is told, and
    training goes on.

    Args:
        config: The object store, and the number of newest checkpoints that stay there.
        say: Called with one line for each failure.

    Raises:
        ConfigError: The URL is of no kind that is known.
        MissingExtraError: The package for this kind of store is not installed.
    """

    def __init__(self, config: CheckpointConfig, say: Callable[[str], object]) -> None:
        self._store = Store(config.store)
        self._keep = config.keep
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="uploading")
        self._newest: Path | None = None

    def saved(self, checkpoint: Path) -> None:
        """Copy a checkpoint that was just saved."""
        self._newest = checkpoint
        self._thread.submit(self._copy, checkpoint)

    def close(self) -> None:
        """Wait until the newest checkpoint is in the store, or has failed."""
        self._thread.shutdown(wait=True)

    def _copy(self, checkpoint: Path) -> None:
        if checkpoint != self._newest:
            return
        try:
            with claimed(checkpoint.parent) as writer:
                writer.read.add(checkpoint.name)  # or it, and each after it, might be deleted too soon
                try:
                    self._store.put(checkpoint, self._keep)
                finally:
                    writer.read.discard(checkpoint.name)
        except (CheckpointError, RunError) as error:
            self._say(
                f"warning: {checkpoint.name} was not copied to {self._store.url}, training goes on: {error}"
            )
