"""Saves that go on in a thread beside the training, one at a time.

The training's thread calls all methods here. Between `begin` and the end of the save the thread of the save
owns the copies of the pieces, the Saver and the Coordinator; the training touches none of them.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shoal.checkpoint.coordinator import Coordinator
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.save import Saver
from shoal.checkpoint.store_coordinator import StoreCoordinator
from shoal.collectives.thread_device import on_callers_device
from shoal.errors import CheckpointError

__all__ = ["Background", "Ended"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A save that has ended.

    Attributes:
        step: The step that was saved.
        path: The checkpoint, complete; None if it could not be saved.
        error: Why it could not be saved; None if it was.
        warnings: One line for each fault that cost nothing but space, such as an old checkpoint that could
            not be deleted.
        seconds: Seconds from the copy to the end.
    """

    step: int
    path: Path | None
    error: CheckpointError | None
    warnings: Sequence[str]
    seconds: float


@final
class Background:
    """Save checkpoints beside the training; all ranks call `begin` together.

    Args:
        saver: Saves them.
        coordinator: The ranks, for this alone: no other thread uses it.
    """

    def __init__(self, saver: Saver, coordinator: Coordinator) -> None:
        self._saver = saver
        self._coordinator = coordinator
        self._thread: threading.Thread | None = None
        self._ended: Ended | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save goes on."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self, directory: Path, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], keep: int = 0
    ) -> None:
        """Begin to save a checkpoint, when the one before has ended.

        Args:
            directory: See `save`.
            step: See `save`.
            pieces: Copies of this rank's pieces, which nobody else changes until the save has ended.
            state: See `save`; a copy is made.
            keep: See `Saver.save`.
        """
        assert self._thread is None, "the result of the save before was taken"
        self.give_up_after(math.inf)
        work = directory, step, pieces, copy.deepcopy(dict(state)), keep
        # A daemon: a process that fails does not wait for ranks that are gone.
        run = on_callers_device(self._run)
        self._thread = threading.Thread(target=run, args=work, name="shoal save", daemon=True)
        self._thread.start()

    def take(self) -> Ended | None:
        """Return the save that has ended since the last call; None if there is none, or it goes on."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        ended, self._ended = self._ended, None
        return ended

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the save has ended, if one goes on; at most so many seconds, if they are given."""
        if self._thread is not None:
            self._thread.join(seconds)

    def give_up_after(self, seconds: float) -> None:
        """Let the save fail if this rank, once its own part is written, waits so long for another."""
        if isinstance(self._coordinator, StoreCoordinator):
            self._coordinator.give_up_after(seconds)

    def _run(
        self, directory: Path, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], keep: int
    ) -> None:
        began = time.perf_counter()
        path, failure, warnings = None, None, list[str]()
        try:
            path = self._saver.save(directory, step, pieces, state, self._coordinator, keep, warnings.append)
        except CheckpointError as error:
            failure = error
        except Exception as error:
            failure = CheckpointError(f"cannot save step {step} in {directory}: {error!r}")
            failure.__cause__ = error
        self._ended = Ended(step, path, failure, warnings, time.perf_counter() - began)
