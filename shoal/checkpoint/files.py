"""The disk operations that checkpoints need; each can fail, or be the last before a crash."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

__all__ = ["REAL_FILES", "FileSystem", "RealFiles", "digest_of", "hash_of_file", "remove_tree", "write_file"]

_CHUNK_BYTES = 4 << 20
_GATHERED_BYTES = 64 << 10  # small tensors are written together up to this
_CHUNKS_AHEAD = 4  # chunks that writing may be ahead of hashing, which bounds what is in memory


class FileSystem(Protocol):
    """The operations on the disk, one method each, so that tests can simulate a crash at each.

    It has no reads, because a reader that dies changes nothing.
    """

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; leave one that exists as it is."""
        ...

    def create(self, path: Path) -> FileIO:
        """Open a new, empty, unbuffered file for writing."""
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
        """Open a new, empty, unbuffered file for writing."""
        return FileIO(path, "w")

    def write(self, file: FileIO, data: memoryview) -> None:
        """Write all of `data`; the operating system may take it in several parts."""
        while data:
            data = data[file.write(data) :]

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


def write_file(path: Path, blocks: Iterable[memoryview], files: FileSystem) -> tuple[int, str]:
    """Write the bytes of `blocks` to a new file and wait until they are on the disk.

    A second thread hashes each chunk while this one writes it.

    Args:
        path: The file.
        blocks: Flat views of bytes, produced one at a time so that only few need be in memory.
        files: The FileSystem to write to.

    Returns:
        The file's size in bytes, and the SHA-256 of its content, in hexadecimal.
    """
    digest = hashlib.sha256()
    hashing: deque[Future[None]] = deque()
    size = 0
    with files.create(path) as file, ThreadPoolExecutor(1, "shoal hash") as thread:
        for chunk in _chunks(blocks):
            hashing.append(thread.submit(digest.update, chunk))
            files.write(file, chunk)
            size += len(chunk)
            if len(hashing) > _CHUNKS_AHEAD:
                hashing.popleft().result()
        files.sync(file)
    return size, digest.hexdigest()


def digest_of(blocks: Iterable[memoryview]) -> str:
    """Return the SHA-256 of the bytes of `blocks`, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in _chunks(blocks):
        digest.update(chunk)
    return digest.hexdigest()


def hash_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal; a second thread hashes each chunk while this one reads.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    chunk, other = memoryview(bytearray(_CHUNK_BYTES)), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "shoal hash") as thread:
        hashing: Future[None] = thread.submit(digest.update, b"")
        while count := file.readinto(chunk):
            hashing.result()
            hashing = thread.submit(digest.update, chunk[:count])
            chunk, other = other, chunk
    return digest.hexdigest()


def _chunks(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes in chunks: long blocks are cut, and short ones put together."""
    gathered = bytearray()
    for block in blocks:
        if len(gathered) + len(block) <= _GATHERED_BYTES:
            gathered += block
            continue
        if gathered:
            yield memoryview(gathered)
            gathered = bytearray()
        for first in range(0, len(block), _CHUNK_BYTES):
            yield block[first : first + _CHUNK_BYTES]
    if gathered:
        yield memoryview(gathered)


def remove_tree(path: Path, files: FileSystem) -> None:
    """Remove a directory and all that it holds; remove links and do not follow them."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child, files)
        else:
            files.remove_file(child)
    files.remove_directory(path)
