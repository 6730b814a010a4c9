"""A rank's state outside of its device: files, page-locked memory, and the threads that move blocks.

Arrays in a file: moved by ranges past the page cache, or seen as tensors.

A file has no name in its folder, so that the space is free again when the process ends, however it ends. Its
space is reserved when a segment is added: a folder that is too small is found before training begins.

Ranges are read and written with O_DIRECT where the file system can: the pages would be used once only, and
would push others out of memory. Elsewhere their pages are given back as soon as they were moved. The tensor
of a segment is a mapping of the file, for uses outside of a step, such as checkpoints: its pages are the page
cache's, which the system writes back and frees when it needs memory. Both show the same values, as the system
writes changed pages before it reads past them, and drops pages that it writes past.

A bucket's shard whose parameters, gradients or both are kept in files.

Tensors of parameters and gradients are then mappings of the files, which anybody may read between backward
and update. A step itself moves whole shards: parameters are read for a gather, gradients are written when
they are reduced.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from shoal.collectives import return_freed_memory, use_huge_pages
from shoal.collectives.host_buffers import HostPages
from shoal.errors import ConfigError, LayoutError, OffloadError
from shoal.record import NullRecorder, Recorder
from shoal.spec.plan import GRANULE, Plan, Tiers
from shoal.spec.timeline import Kind
from shoal.units import format_bytes


@final
class StateFile:
    """A file of segments, one after another.

    Args:
        folder: The folder of the file.
        title: What it holds, for messages.

    Raises:
        ConfigError: No file can be made in the folder.
    """

    def __init__(self, folder: Path, title: str) -> None:
        self.title = title
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"offload_folder={folder} cannot have a file for {title}: {error.strerror}",
                possible="a folder in which this user may write, best on a fast local disk",
                change="set offload_folder to such a folder",
            ) from error
        self.descriptor = self._file.fileno()
        self.nbytes = 0
        self.is_direct = _set_direct(self.descriptor)

    def add(self, elements: int, dtype: torch.dtype) -> Segment:
        """Return a new segment of zeros at the end of the file.

        Args:
            elements: Number of elements.
            dtype: Type of an element.

        Raises:
            ConfigError: The folder has no space for it.
        """
        start = self.nbytes
        nbytes = -(-max(elements, 1) // GRANULE) * GRANULE * dtype.itemsize
        try:
            os.posix_fallocate(self.descriptor, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self.failed("reserve space", error) from error
            free = os.fstatvfs(self.descriptor)
            raise ConfigError(
                f"offload_folder={self.folder} has {format_bytes(free.f_bavail * free.f_frsize)} left, and "
                f"{self.title} of this rank needs {format_bytes(nbytes)} more after {format_bytes(start)}: "
                f"{error.strerror}",
                possible="a folder with space for the offloaded state of all ranks of this host",
                change="set offload_folder to another folder, free space, or shard over more ranks",
            ) from error
        self.nbytes = start + nbytes
        return Segment(self, start, elements, dtype)

    def failed(self, action: str, error: OSError) -> OffloadError:
        """Return the error for a file that could not be read or written."""
        return OffloadError(f"cannot {action} {self.title} in {self.folder}: {error.strerror or error}")


@final
class Segment:
    """An array in a file.

    Args:
        file: The file.
        start: First byte of the array.
        elements: Number of elements.
        dtype: Type of an element.

    Attributes:
        tensor: The array `[elements]`, mapped.
    """

    def __init__(self, file: StateFile, start: int, elements: int, dtype: torch.dtype) -> None:
        self._file = file
        self._start = start
        self.elements = elements
        self.dtype = dtype
        nbytes = file.nbytes - start
        mapped = mmap.mmap(file.descriptor, nbytes, offset=start)
        self.tensor = torch.frombuffer(mapped, dtype=dtype)[:elements]

    def read(self, first: int, into: torch.Tensor) -> None:
        """Read elements from `first` on into a buffer of `aligned_buffer`.

        Args:
            first: A multiple of GRANULE.
            into: The buffer, of a multiple of GRANULE elements.

        Raises:
            OffloadError: The file could not be read.
        """
        self._move("read", first, into)

    def write(self, first: int, values: torch.Tensor) -> None:
        """Write a buffer over the elements from `first` on; arguments as of `read`.

        Raises:
            OffloadError: The file could not be written.
        """
        self._move("write", first, values)

    def _move(self, action: str, first: int, buffer: torch.Tensor) -> None:
        move = os.preadv if action == "read" else os.pwritev
        view = buffer.view(torch.uint8).numpy().data
        start, done = self._start + first * self.dtype.itemsize, 0
        try:
            while done < len(view):
                moved = move(self._file.descriptor, [view[done:]], start + done)
                if moved == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += moved
            if not self._file.is_direct:
                os.posix_fadvise(self._file.descriptor, start, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._file.failed(action, error) from error


def aligned_buffer(elements: int, dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """Return memory for at least `elements` elements, as ranges of files move to and from it.

    Args:
        elements: Number of elements; rounded up to a multiple of GRANULE.
        dtype: Type of an element.
        pinned: Whether the memory is page-locked, so that a GPU copies to and from it quickly; without a GPU
            it never is.
    """
    nbytes = -(-elements // GRANULE) * GRANULE * dtype.itemsize
    if pinned and torch.cuda.is_available():
        pages = HostPages(nbytes)
        pages.tensor.zero_()  # by all threads of torch; CUDA touches pages by one
        if reason := pages.lock():
            warnings.warn(reason, stacklevel=2)
        return pages.tensor.view(dtype)
    memory = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8)
    use_huge_pages(memory.data_ptr(), memory.nbytes)
    offset = -memory.data_ptr() % mmap.PAGESIZE
    return memory[offset : offset + nbytes].view(dtype)


def _set_direct(descriptor: int) -> bool:
    """Turn O_DIRECT on; return whether the file system has it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return False
    return True


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


@final
class StoredShard:
    """The place in files of a bucket's shard.

    Args:
        storage: This rank's files.
        elements: Length of the shard's buffer.
        dtype: Type of the parameters.
        trains: Whether the parameters are trained, and have gradients.

    Attributes:
        elements: The argument `elements`.
        parameters: The parameters; None if they stay in memory.
        gradients: The gradients, fp32; None if they stay in memory, or there are none.
    """

    def __init__(self, storage: Storage, elements: int, dtype: torch.dtype, *, trains: bool) -> None:
        self.elements = elements
        self._storage = storage

        def add(part: str, dtype: torch.dtype) -> Segment | None:
            if getattr(storage.tiers, part) == "device":
                return None
            segment = storage.add(part, f"the {part}", elements, dtype)
            assert isinstance(segment, Segment)
            return segment

        self.parameters = add("parameters", dtype)
        self.gradients = add("gradients", torch.float32) if trains else None
        self._staged: torch.Tensor | None = None
        self._reading: Future[None] | None = None

    @property
    def is_reading(self) -> bool:
        """Whether a read was started and not finished."""
        return self._reading is not None

    def start_read(self) -> None:
        """Begin to read the parameters."""
        assert self.parameters is not None
        self._staged = aligned_buffer(self.elements, self.parameters.dtype)
        self._reading = self._storage.start(self.parameters.read, 0, self._staged)

    def finish_read(self) -> torch.Tensor:
        """Return the parameters `[elements]` that were read."""
        assert self._staged is not None
        assert self._reading is not None
        self._storage.wait(self._reading, "read:parameters")
        staged, self._staged, self._reading = self._staged, None, None
        return staged

    def write_gradients(self, values: torch.Tensor) -> None:
        """Begin to write gradients, from a buffer of `aligned_buffer`; `Storage.settle` waits for it."""
        assert self.gradients is not None
        self._storage.write_behind(self.gradients.write, 0, values)


@dataclass(slots=True)
class Stored:
    """The place of an owned parameter's part in a stored shard.

    Attributes:
        shard: The shard.
        offset: The part's first element in the shard's buffer.
        norm: Norm of the gradient that was written last; None if none was.
        written: Where that gradient lies, and the versions of it and of the DTensor around it.
    """

    shard: StoredShard
    offset: int
    norm: torch.Tensor | None = None
    written: tuple[int, int, int] | None = None

    def norm_of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the norm of a parameter's gradient, unless it has changed since it was written."""
        return self.norm if _state_of(gradient) == self.written else None


def note_norms(stored: Sequence[tuple[Stored, torch.Tensor, torch.Tensor]]) -> None:
    """Keep the norms of gradients that are about to be written: place, value in memory, the gradient."""
    norms = torch._foreach_norm([value for _, value, _ in stored]) if stored else ()
    for (place, _, gradient), norm in zip(stored, norms, strict=True):
        place.norm, place.written = norm, _state_of(gradient)


def _state_of(gradient: torch.Tensor) -> tuple[int, int, int]:
    """Return where a gradient lies, and its versions: an operation on a DTensor counts for this alone."""
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return local.data_ptr(), local._version, gradient._version
