"""A rank's state outside of its device: files, page-locked memory, and the threads that move blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch

from shoal.collectives import return_freed_memory
from shoal.errors import ConfigError, LayoutError
from shoal.parallel.offload.state_file import Segment, StateFile, aligned_buffer
from shoal.plan import Plan, Tiers
from shoal.record import NullRecorder, Recorder
from shoal.timeline import Kind

_THREADS = 4


@final
class HostSegment:
    """An array in the host's page-locked memory.

    Args:
        elements: Number of elements.
        dtype: Type of an element.

    Attributes:
        tensor: The array `[elements]`.
    """

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self.elements = elements
        self.dtype = dtype
        self.tensor = aligned_buffer(elements, dtype, pinned=True).zero_()


@final
class Storage:
    """The segments of a rank, in a file for each thing that they hold.

    Args:
        tiers: The place of each part of the state.
        folder: Folder of the files; None if there are none.
        recorder: Recorder of the waits for files.

    Attributes:
        tiers: The argument `tiers`.
    """

    def __init__(self, tiers: Tiers, folder: Path | None, recorder: Recorder | None = None) -> None:
        self.tiers = tiers
        self._recorder = recorder if recorder is not None else NullRecorder()
        self._folder = folder
        self._files: dict[str, StateFile] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="offload")
        self._writing: list[Future[None]] = []

    @classmethod
    def of(
        cls, plan: Plan, device: torch.device, folder: Path | None, recorder: Recorder | None = None
    ) -> Storage | None:
        """Return the storage of a rank; None if all of its state stays on its device.

        With files the process gives freed memory back to the system: see `return_freed_memory`.

        Args:
            plan: The Plan, which says what is kept where.
            device: The rank's device. A CPU's memory is the host's.
            folder: Folder of the files.
            recorder: Recorder of the waits for files.

        Raises:
            ConfigError: There are to be files, and there is no folder.
            LayoutError: Other state of a GPU than the optimizer's is to be in files.
        """
        tiers = plan.tiers
        if not tiers.moved or (device.type == "cpu" and not tiers.has_files):
            return None
        if device.type != "cpu" and set(tiers.moved) - {"optimizer"}:
            raise LayoutError(
                f"offload={tiers} was given for a rank on {device.type}",
                possible="on GPUs optimizer:host and optimizer:file; other parts on CPUs alone",
                change="offload the optimizer's state alone",
            )
        if tiers.has_files and folder is None:
            raise ConfigError(
                f"offload={tiers} was given without a folder for its files",
                possible="a folder on a fast local disk, with space for the state of all ranks of this host",
                change="give offload_folder",
            )
        if tiers.has_files:
            return_freed_memory()
        return cls(tiers, folder, recorder)

    @property
    def has_shards(self) -> bool:
        """Whether shards of gradients or of parameters are in files."""
        return "file" in (self.tiers.gradients, self.tiers.parameters)

    def add(self, part: str, name: str, elements: int, dtype: torch.dtype) -> Segment | HostSegment:
        """Return a new array of zeros.

        Args:
            part: The part of the state that it belongs to: a field of `Tiers`.
            name: What it holds; arrays of one name are in one file.
            elements: Number of elements.
            dtype: Type of an element.

        Raises:
            ConfigError: There is no space for it.
        """
        if getattr(self.tiers, part) == "host":
            return HostSegment(elements, dtype)
        assert self._folder is not None
        if name not in self._files:
            self._files[name] = StateFile(self._folder, name)
        return self._files[name].add(elements, dtype)

    def start(self, move: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run a move of a segment in another thread."""
        return self._threads.submit(move, *arguments)

    def wait(self, move: Future[None], name: str) -> None:
        """Wait for a move, recorded as a wait for files unless it is done.

        Args:
            move: The move, as `start` returned it.
            name: What is waited for, as the Timeline names it.

        Raises:
            OffloadError: The move failed.
        """
        if move.done():
            move.result()
            return
        with self._recorder.span(Kind.FILE_WAIT, name):
            move.result()

    def write_behind(self, move: Callable[..., None], *arguments: Any) -> Future[None]:
        """Start a write, once at most one other is running; `settle` waits for both."""
        while len(self._writing) > 1:
            self.wait(self._writing.pop(0), "write")
        self._writing.append(self.start(move, *arguments))
        return self._writing[-1]

    def settle(self) -> None:
        """Wait for the writes behind.

        Raises:
            OffloadError: One failed.
        """
        while self._writing:
            self.wait(self._writing.pop(0), "write")
