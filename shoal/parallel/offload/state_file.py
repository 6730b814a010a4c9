"""Arrays in a file: moved by ranges past the page cache, or seen as tensors.

A file has no name in its folder, so that the space is free again when the process ends, however it ends. Its
space is reserved when a segment is added: a folder that is too small is found before training begins.

Ranges are read and written with O_DIRECT where the file system can: the pages would be used once only, and
would push others out of memory. Elsewhere their pages are given back as soon as they were moved. The tensor
of a segment is a mapping of the file, for uses outside of a step, such as checkpoints: its pages are the page
cache's, which the system writes back and frees when it needs memory. Both show the same values, as the system
writes changed pages before it reads past them, and drops pages that it writes past.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import warnings
from pathlib import Path
from typing import final

import torch

from shoal.collectives import use_huge_pages
from shoal.collectives.page_lock import HostPages
from shoal.errors import ConfigError, OffloadError
from shoal.plan import GRANULE
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
