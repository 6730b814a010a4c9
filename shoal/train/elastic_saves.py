"""Checkpoints in the host's memory: what members of a training go on from when one of them is lost.

They are ordinary checkpoints in a folder of the memory file system, so any other Plan can load them, and they
outlive the process that wrote them. Where there are several hosts, each keeps a part; see `host_memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, final

from shoal.checkpoint import Coordinator, Ended, RealFiles, Saver, SingleProcess, checkpoints
from shoal.checkpoint.directory import delete
from shoal.errors import CheckpointError
from shoal.scratch import scratch_folder
from shoal.train.host_memory import HostMemory
from shoal.train.saves import has_room_for
from shoal.train.trainer import Trainer

__all__ = ["FOLDER", "MemorySaves", "memory_folder"]

FOLDER = "SHOAL_MEMORY_FOLDER"
"""Environment variable: the folder of these checkpoints."""

_MEMORY = Path("/dev/shm")
_PREFIX = "shoal-members-"
_SHARE = 0.005  # of the time of steps that saves may take with every = "auto"
_PATIENCE = 0.1  # seconds for other ranks' parts of a save after a rank was lost: others wait for this one
_KEPT = 16  # steps and saves whose median counts


@contextmanager
def memory_folder() -> Iterator[Path | None]:
    """Make a folder in this host's memory, and remove it after the context; None if there is no such memory.

    Folders whose process was killed are removed too; see `shoal.scratch`.
    """
    if not _MEMORY.is_dir():
        yield None
        return
    with scratch_folder(_PREFIX, _MEMORY) as folder:
        yield folder


@final
class MemorySaves:
    """Save the state into the host's memory while training goes on; all ranks call each method together.

    Args:
        trainer: The Trainer.
        every: Steps between two saves, 0 for none; with "auto" saves take 0.5 % of the time of steps:
            that for which steps wait, and on a CPU, where both share the cores, also that beside the steps.
        directory: The folder in memory.
        disk: The directory of checkpoints that takes the state if there is no room in memory.
        extra: A JSON object to keep with each checkpoint.
        coordinator: All ranks.
        say: Told of failures.
        hosts: The memory of all hosts, if there may be several.

    Attributes:
        directory: The folder in memory.
        hosts: The memory of all hosts, if there may be several.
    """

    def __init__(
        self,
        trainer: Trainer,
        every: int | str,
        directory: Path,
        disk: Path,
        extra: Mapping[str, Any],
        coordinator: Coordinator,
        say: Callable[[str], object],
        hosts: HostMemory | None = None,
    ) -> None:
        self._trainer = trainer
        self.hosts = hosts
        self._is_spread = hosts is not None and hosts.has_neighbours
        if hosts is not None:
            trainer.saved.spread = hosts
            if hosts.has_neighbours:
                trainer.saves.spread(hosts)
        self._every = every
        self.directory = directory
        self._disk = disk
        self._extra = extra
        self._coordinator = coordinator
        self._say = say
        self._interval = 1 if every == "auto" else int(every)
        self._saved_at = -math.inf  # the first step is saved
        self._seconds: list[float] = []
        self._stalls: list[float] = []
        self._behind = 0.0
        self._has_failed = False  # then the next failure is not told
        # A neighbour keeps a copy of each file.
        self._in_memory = 2 if self._is_spread else 1
        trainer.saves.patience = _PATIENCE

    def stepped(self, seconds: float) -> None:
        """Take note of the time of a step."""
        self._seconds = [*self._seconds[1 - _KEPT :], seconds]

    def save_if_due(self) -> None:
        """Begin to save, if the last save is long enough ago; a failure is told, and training goes on."""
        step = self._trainer.step_count
        if not self._interval or step - self._saved_at < self._interval:
            return
        self._saved_at = step
        keep = 0 if self._is_spread else 1  # each host drops older ones by itself
        try:
            given = self._trainer.to_save(self.directory, self._extra)
            begun = self._trainer.saves.begin(*given, keep, self._ended, self._in_memory)
        except CheckpointError as error:
            self._fail(step, error)
            if self._every == "auto":
                self._interval = max(self._interval, _KEPT)
            return
        self._stalls = [*self._stalls[1 - _KEPT :], begun.stalled]
        if self._every == "auto":
            mine = median(self._stalls), median(self._seconds), self._behind
            told = self._coordinator.all_gather_object(mine)
            stalled, seconds, behind = map(max, zip(*told, strict=True))
            costs = stalled + behind if self._trainer.parallel.device.type == "cpu" else stalled
            self._interval = max(1, math.ceil(max(costs / _SHARE, behind) / seconds))

    def save_now(self) -> None:
        """Save before the members change, on disk if there is no room in memory; all go on from this.

        Raises:
            CheckpointError: It could not be written.
        """
        self._trainer.finish_saving()
        try:
            given = self._trainer.to_save(self.directory, self._extra)
            path = self._trainer.saves.now(*given, self._in_memory)
        except CheckpointError as error:
            self._fail(self._trainer.step_count, error)
            path = self._trainer.save(self._disk, self._extra)
        if self._coordinator.rank == 0:
            self._drop_all_but(path)

    def save_replica(self) -> None:
        """Save the state that this rank has, where it has all of it, after other ranks were lost.

        Raises:
            CheckpointError: It could not be written.
        """
        _, step, state = self._trainer.to_save(self.directory, self._extra)
        pieces, kept = self._trainer.saved.replica_to_save(state)
        directory = self.directory if has_room_for(pieces) else self._disk
        self._drop_all_but(Saver().save(directory, step, pieces, kept, SingleProcess()))

    def _drop_all_but(self, path: Path) -> None:
        """Delete what is in memory, other than the newest checkpoint: a rank that comes needs the room.

        Where files are spread over hosts, each host drops older ones by itself.
        """
        if self._is_spread:
            return
        try:
            delete([each for each in checkpoints(self.directory) if each != path], RealFiles())
        except OSError as error:
            self._say(f"warning: older checkpoints stay in memory: {error}")

    def _ended(self, ended: Ended) -> None:
        self._behind = ended.seconds
        if ended.error is None:
            self._has_failed = False
        else:
            self._fail(ended.step, ended.error)

    def _fail(self, step: int, error: CheckpointError) -> None:
        if not self._has_failed:
            self._say(f"warning: step {step} was not saved in memory: {error}")
        self._has_failed = True
