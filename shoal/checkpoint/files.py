"""The disk operations that checkpoints need; each can fail, or be the last before a crash."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Final, Protocol, final

import numpy as np
import numpy.typing as npt

from shoal.limits import open_regular

ALIGNMENT = 4096
"""Bytes of which places in memory and in a file are multiples where writing goes past the system's cache."""

_CHUNKS_AHEAD = 3  # chunks that may be in use, beside the one that is made: this bounds what is in memory
_CHUNK_BYTES = 4 << 20  # of a chunk: requests of 2 MiB reached two thirds of the disk's rate
_READ_BYTES = 2 << 20  # of a file that is read
_DIRECT = getattr(os, "O_DIRECT", 0)  # no such flag outside of Linux


class FileSystem(Protocol):
    """The operations on the disk, one method each, so that tests can simulate a crash at each.

    It has no reads, because a reader that dies changes nothing.
    """

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; leave one that exists as it is."""
        ...

    def create(self, path: Path) -> FileIO:
        """Open a new, unbuffered file for writing; raise FileExistsError if there is one."""
        ...

    def write(self, file: FileIO, data: memoryview) -> None:
        """Write all of `data`."""
        ...

    def sync(self, file: FileIO) -> None:
        """Wait until the file's content is on the disk."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Wait until the directory's entries are on the disk."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Rename a directory, atomically, to a name that is free."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, or raise OSError where that is not possible."""
        ...

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        ...

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        ...


class RealFiles:
    """The FileSystem of the operating system."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; leave one that exists as it is."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> FileIO:
        """Open a new, unbuffered file for writing, past the system's cache where that is possible."""
        file = FileIO(path, "x")
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                file.close()
                raise
        return file

    def write(self, file: FileIO, data: memoryview) -> None:
        """Write all of `data`; the operating system may take it in several parts.

        What is not aligned, such as the end of a file, goes through the cache, and so does what follows it.
        """
        while data:
            if not _is_aligned(data):
                _write_through_cache(file)
            try:
                data = data[file.write(data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not _write_through_cache(file):
                    raise

    def sync(self, file: FileIO) -> None:
        """Wait until the file's content is on the disk."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Wait until the directory's entries are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a directory, atomically, to a name that is free."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, or raise OSError where that is not possible."""
        target.hardlink_to(source)

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()


REAL_FILES: Final = RealFiles()
"""The default FileSystem everywhere; it holds no state."""


def _is_aligned(data: memoryview) -> bool:
    return (np.frombuffer(data, np.uint8).ctypes.data | len(data)) % ALIGNMENT == 0


def _write_through_cache(file: FileIO) -> bool:
    """Let a file be written through the system's cache; return whether it was not before."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if flags & _DIRECT:
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


@final
class Chunks:
    """Cut blocks of bytes into aligned chunks, one file after the other.

    What is not aligned is copied. The memory for that is kept for the next file: new memory may come slowly
    from the system.
    """

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] | None = None

    def cut(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the same bytes in chunks that are aligned, all but the last one.

        A block that is aligned is cut. Others are copied to memory that is used again some chunks later.

        Args:
            blocks: Flat views of bytes.
        """
        if self._memory is None:
            self._memory = _new_memory((_CHUNKS_AHEAD + 2) * _CHUNK_BYTES)
        free = itertools.cycle(self._memory.reshape(-1, _CHUNK_BYTES))
        chunk, filled = next(free), 0
        for block in blocks:
            source = np.frombuffer(block, np.uint8)
            if (
                source.ctypes.data % ALIGNMENT == 0
                and filled % ALIGNMENT == 0
                and source.size >= _CHUNK_BYTES
            ):
                if filled:
                    yield chunk[:filled].data
                    chunk, filled = next(free), 0
                while source.size >= _CHUNK_BYTES:
                    yield source[:_CHUNK_BYTES].data
                    source = source[_CHUNK_BYTES:]
            while source.size:
                count = min(source.size, _CHUNK_BYTES - filled)
                np.copyto(chunk[filled : filled + count], source[:count])  # lets other threads run
                source, filled = source[count:], filled + count
                if filled == _CHUNK_BYTES:
                    yield chunk.data
                    chunk, filled = next(free), 0
        if filled:
            yield chunk[:filled].data


def _new_memory(size: int) -> npt.NDArray[np.uint8]:
    """Return memory that is quick to write from: in large pages, beyond the chunk that small files take."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE, _CHUNK_BYTES)
    return np.frombuffer(block, np.uint8)


def write_file(
    path: Path, blocks: Iterable[memoryview], files: FileSystem, chunks: Chunks | None = None
) -> tuple[int, str]:
    """Write the bytes of `blocks` to a new file and wait until they are on the disk.

    One thread hashes a chunk and another one writes it, while this one makes the next.

    Args:
        path: The file.
        blocks: Flat views of bytes, produced one at a time so that only few need be in memory.
        files: The FileSystem to write to.
        chunks: What cuts the blocks, if its memory is to be used again.

    Returns:
        The file's size in bytes, and the SHA-256 of its content, in hexadecimal.
    """
    digest = hashlib.sha256()
    pending: deque[Future[None]] = deque()
    size = 0
    with (
        files.create(path) as file,
        ThreadPoolExecutor(1, "shoal hash") as hashes,
        ThreadPoolExecutor(1, "shoal write") as writes,
    ):
        for chunk in (chunks or Chunks()).cut(blocks):
            pending += hashes.submit(digest.update, chunk), writes.submit(files.write, file, chunk)
            size += len(chunk)
            while len(pending) > 2 * _CHUNKS_AHEAD:
                pending.popleft().result()
        for each in pending:
            each.result()
        files.sync(file)
    return size, digest.hexdigest()


def digest_of(blocks: Iterable[memoryview]) -> str:
    """Return the SHA-256 of the bytes of `blocks`, in hexadecimal."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def hash_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal; a second thread hashes each chunk while this one reads.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    chunk, other = memoryview(bytearray(_READ_BYTES)), memoryview(bytearray(_READ_BYTES))
    with open_regular(path) as file, ThreadPoolExecutor(1, "shoal hash") as thread:
        hashing: Future[None] = thread.submit(digest.update, b"")
        while count := file.readinto(chunk):
            hashing.result()
            hashing = thread.submit(digest.update, chunk[:count])
            chunk, other = other, chunk
    return digest.hexdigest()


def remove_tree(path: Path, files: FileSystem) -> None:
    """Remove a file, or a directory and all that it holds; remove links and do not follow them."""
    if path.is_symlink() or not path.is_dir():
        files.remove_file(path)
        return
    for child in sorted(path.iterdir()):
        remove_tree(child, files)
    files.remove_directory(path)
