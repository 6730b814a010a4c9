"""Saves of a user's own loop, written beside it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, final

import torch

from shoal.parallel import Parallel
from shoal.record import NullRecorder
from shoal.train.checkpointer import Checkpointer
from shoal.train.portable import OwnTraining, all_ranks

__all__ = ["BackgroundSaves"]


@final
class BackgroundSaves:
    """Save the training of a user's own loop like `shoal.save`, while the loop goes on.

        saves = BackgroundSaves(directory, parallel, optimizer, keep=2)
        for step in range(steps):
            ...
            if step % 100 == 0:
                saves.save(step=step)
        saves.finish()

    All ranks call each method together. Nothing else may save into the directory meanwhile.

    Args:
        directory: Directory of checkpoints, on a file system that all ranks see; made if absent.
        parallel: The model.
        optimizer: Optimizer of its parameters; join several as `shoal.parallel.Together`.
        keep: Number of newest checkpoints in the directory that stay; 0 keeps all.

    Attributes:
        newest: The newest checkpoint that was saved by this; None before the first.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        parallel: Parallel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keep: int = 0,
    ) -> None:
        self._directory = Path(directory)
        self._keep = keep
        ranks = all_ranks()
        own = OwnTraining(parallel, optimizer, ranks)
        self._checkpointer = Checkpointer(own, self._note, NullRecorder(), ranks)
        self.newest: Path | None = None

    def save(self, *, step: int, **state: Any) -> None:
        """Begin to save, and return once the state is copied to host memory.

        It first waits for the save before. If that one failed, it warns.

        Args:
            step: The number of the checkpoint.
            state: Further values to keep, as JSON; rank 0's are kept.

        Raises:
            CheckpointError: On all ranks: the optimizer has state that a checkpoint cannot hold.
        """
        self._checkpointer.begin(self._directory, step, state, keep=self._keep)

    def finish(self) -> Path | None:
        """Wait for the last save, warn if it failed, and return the newest checkpoint."""
        self._checkpointer.finish()
        return self.newest

    def _note(self, path: Path) -> None:
        self.newest = path
