"""The checkpointer of a training: saves its state while the training waits, or beside it.

Beside the training, a step waits for two things: for the save before, if that still goes on, and for a copy
of the state in host memory. A thread writes the copy. There is never more than one copy. If a host has no
memory for it, training waits until the checkpoint is written. `save_policy` says when a run saves, and where.
"""

from __future__ import annotations

import math
import platform
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

from shoal.checkpoint import Background, Coordinator, Ended, Piece, Saver, Spread, Staging, coordinator_beside
from shoal.errors import CheckpointError, CommunicationError
from shoal.parallel.device import available_memory, memory_of_steps
from shoal.record import Recorder
from shoal.spec.timeline import Kind
from shoal.units import format_bytes

Told = Callable[[Ended], object] | None
"""A function that is called with the end of a save, if there is one."""

_LOOK = 0.02  # seconds between two looks whether a save has ended on all ranks
_LEFT = 0.1  # share of a host's free memory that copies leave
_OTHERS, _LOST = 60.0, 3.0  # seconds to wait for other ranks' parts at the end, and after one was lost


class Source(Protocol):
    """What is to be saved."""

    def pieces(self) -> list[Piece]:
        """Return this rank's pieces as far as they are known without the other ranks."""
        ...

    def to_save(
        self, directory: Path, step: int, state: Mapping[str, Any]
    ) -> tuple[list[Piece], dict[str, Any]]:
        """Return this rank's pieces, in the memory of training, and the state beside them.

        Args:
            directory: Directory of checkpoints.
            step: Optimizer steps made.
            state: A JSON object to keep with the checkpoint.

        Raises:
            CheckpointError: There is a state that a checkpoint cannot hold.
        """
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A save that was begun.

    Attributes:
        waited: Seconds for which training waited for the save before.
        stalled: Seconds for which training waited in all.
        in_step: Why it was written while training waited, and is complete; "" if it goes on beside it.
    """

    waited: float
    stalled: float
    in_step: str = ""


@final
class Checkpointer:
    """Save the checkpoints of a training; all ranks call each method together, `poll` and `close` excepted.

    Args:
        source: Gives what is to be saved.
        on_save: Called with each checkpoint.
        recorder: Recorder of the time for which training waits.
        coordinator: All ranks.

    Attributes:
        patience: Seconds to wait for other ranks' parts of a save after a rank was lost.
    """

    def __init__(
        self,
        source: Source,
        on_save: Callable[[Path], object],
        recorder: Recorder,
        coordinator: Coordinator,
    ) -> None:
        self._source = source
        self._on_save = on_save
        self._recorder = recorder
        self._coordinator = coordinator
        self.patience = _LOST
        self._saver = Saver()
        self._staging = Staging()
        self._background: Background | None = None
        self._told: Told = None
        self._is_unfinished = False  # equal on all ranks, other than whether the thread has ended

    def spread(self, spread: Spread) -> None:
        """Spread the checkpoints of one directory over the hosts; all ranks call this before they save."""
        self._saver.spread = spread

    def prepare(self) -> None:
        """Make room for copies of the state, after a step, so that the first save need not wait for it.

        The system gives memory at the first touch, at the rate of a disk where a host gives it to a guest. A
        thread touches it meanwhile, and page-locks it for a GPU.
        """
        if not self._reserve(self._source.pieces()):
            self._staging.prepare()

    def save(
        self,
        directory: Path,
        step: int,
        state: Mapping[str, Any],
        *,
        keep: int = 0,
        in_memory: int = 0,
        say: Callable[[str], object] = warnings.warn,
    ) -> Path:
        """Save a checkpoint while training waits; see `begin` for the arguments, and `Saver.save` for `say`.

        In the memory of hosts it leaves room for a rank that comes.

        If there is memory for a copy, from saves beside the training, it is written from there: large and
        aligned requests are quicker than those that pass through a small buffer.

        Raises:
            CheckpointError: It could not be written; training can go on.
        """
        self.finish()
        with self._recorder.span(Kind.CHECKPOINT):
            pieces, kept = self._source.to_save(directory, step, state)
            if in_memory:
                self._memory_of_hosts(0, in_memory * _bytes(pieces), memory_of_steps()[0])
            if self._staging.has_room(pieces):
                pieces = self._staging.copy(pieces)
            path = self._saver.save(directory, step, pieces, kept, self._coordinator, keep, say)
        self._on_save(path)
        return path

    def begin(
        self,
        directory: Path,
        step: int,
        state: Mapping[str, Any],
        *,
        keep: int = 0,
        in_memory: int = 0,
        told: Told = None,
    ) -> Begun:
        """Begin to save a checkpoint beside the training.

        Args:
            directory: Directory of checkpoints.
            step: Optimizer steps made.
            state: A JSON object to keep with the checkpoint.
            keep: Number of newest checkpoints that stay; 0 keeps all.
            in_memory: How often the memory of hosts holds each byte of the files; 0 if they are on a disk.
            told: Called with the end of the save, in this call or by a later one of this object; without it,
                a failure is a warning.

        Raises:
            CheckpointError: The state cannot be saved, a host's memory has no room for the files, or they
                could not be written while training waited.
        """
        began = time.perf_counter()
        with self._recorder.span(Kind.CHECKPOINT):
            self.finish()
            waited = time.perf_counter() - began
            pieces, kept = self._source.to_save(directory, step, state)
            if reason := self._reserve(pieces, in_memory):
                faults = list[str]()
                path = self._saver.save(directory, step, pieces, kept, self._coordinator, keep, faults.append)
            else:
                pieces = self._staging.copy(pieces)
        self._told = told
        if reason:
            self._tell(Ended(step, path, None, faults, 0.0))
            return Begun(waited, time.perf_counter() - began, reason)
        if self._background is None:
            self._background = Background(self._saver, coordinator_beside())
            weakref.finalize(self, _end, self._background, _OTHERS)  # at the latest when the process ends
        self._is_unfinished = True
        self._background.begin(directory, step, pieces, kept, keep)
        return Begun(waited, time.perf_counter() - began)

    def finish(self) -> None:
        """Wait until the save beside the training has ended on all ranks, if there is one.

        Raises:
            CommunicationError: Another rank is gone.
        """
        if self._background is not None and self._is_unfinished:
            # Ranks ask each other meanwhile, so that they learn of one that is lost.
            while any(self._coordinator.all_gather_object(self._background.is_busy)):
                self._background.wait(_LOOK)
            self._is_unfinished = False
        self.poll()

    def poll(self) -> None:
        """Tell of a save that has ended since the last call."""
        if self._background is not None and (ended := self._background.take()) is not None:
            self._tell(ended)

    def close(self, reason: BaseException | None) -> None:
        """Wait until the save beside the training has ended on this rank; others may be gone.

        Args:
            reason: The error that ends the training; None at its regular end.
        """
        if self._background is not None:
            _end(self._background, self.patience if isinstance(reason, CommunicationError) else _OTHERS)
            self.poll()
        self._saver.close()

    def _tell(self, ended: Ended) -> None:
        """Tell of the end of a save."""
        if ended.path is not None:
            self._on_save(ended.path)
        if self._told is not None:
            self._told(ended)
        elif self._coordinator.rank == 0:
            for fault in (*ended.warnings, ended.error):
                if fault is not None:
                    warnings.warn(str(fault), stacklevel=4)

    def _reserve(self, pieces: Sequence[Piece], in_memory: int = 0) -> str:
        """Reserve memory for a copy of the pieces on all ranks; return why there is none, or ""."""
        hosts = self._memory_of_hosts(self._staging.missing(pieces), in_memory * _bytes(pieces))
        if not any(each.copies for each in hosts):
            return ""
        reasons = [
            f"a copy of the state takes {format_bytes(each.copies)} on {each.name}, which has "
            f"{format_bytes(int(each.spare) - each.files)} of free memory"
            for each in hosts
            if each.copies + each.files > (1 - _LEFT) * each.spare
        ]
        reason = ""
        if not reasons:
            try:
                self._staging.reserve(pieces)
            except MemoryError as error:
                reason = f"rank {self._coordinator.rank} has no memory for a copy of the state: {error}"
            reasons = [each for each in self._coordinator.all_gather_object(reason) if each]
        if reasons:
            self._staging.release()
        return reasons[0] if reasons else ""

    def _memory_of_hosts(self, copies: int, files: int, coming: int = 0) -> list[_Host]:
        """Return what a save takes of the memory of each host; all ranks call it, and get the same.

        Args:
            copies: Bytes of new memory that this rank's copy takes.
            files: Bytes that this rank's files take in the memory of hosts.
            coming: Bytes that a rank would take if it came to this host.

        Raises:
            CheckpointError: A host has no memory for the files.
        """
        mine = platform.node(), available_memory(), coming, memory_of_steps()[1], copies, files
        told: dict[str, list[Any]] = {}
        for name, *numbers in self._coordinator.all_gather_object(mine):
            told.setdefault(name, []).append(numbers)
        hosts = []
        for name, ranks in told.items():
            free, comings, due, all_copies, all_files = zip(*ranks, strict=True)
            least = min((each for each in free if each is not None), default=math.inf)
            spare = max(0.0, least - max(comings) - sum(due))
            hosts.append(_Host(name, spare, sum(all_copies), sum(all_files)))
        for each in hosts:
            if each.files > (1 - _LEFT) * each.spare:
                raise CheckpointError(
                    f"its files take {format_bytes(each.files)} of the memory of {each.name}, of which "
                    f"{format_bytes(int(each.spare))} is free"
                )
        return hosts


class _Host(NamedTuple):
    """A host's memory, in bytes.

    Attributes:
        name: Its name.
        spare: What saves may take: what is free, less what the next steps and a rank that comes may take;
            infinite if the host does not say what is free.
        copies: What copies take.
        files: What files of a checkpoint in memory take.
    """

    name: str
    spare: float
    copies: int
    files: int


def has_room_for(pieces: Sequence[Piece]) -> bool:
    """Return whether this host's memory has room for files of these pieces, and for a rank that comes."""
    free = available_memory()
    return free is None or _bytes(pieces) <= (1 - _LEFT) * (free - sum(memory_of_steps()))


def _bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.tensor.nbytes for piece in pieces)


def _end(background: Background, patience: float) -> None:
    """Wait for a save on this rank, and for other ranks no longer than so many seconds."""
    background.give_up_after(patience)
    background.wait()
