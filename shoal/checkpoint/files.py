"""The disk operations that checkpoints need; each can fail, or be the last before a crash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

__all__ = ["REAL_FILES", "FileSystem", "RealFiles", "remove_tree", "write_file"]

_CHUNK_BYTES = 4 << 20


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

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()


REAL_FILES: Final = RealFiles()
"""The default FileSystem everywhere; it holds no state."""


def write_file(path: Path, blocks: Iterator[memoryview], files: FileSystem) -> tuple[int, str]:
    """Write the bytes of `blocks` to a new file and wait until they are on the disk.

    Args:
        path: The file.
        blocks: Flat views of bytes, produced one at a time so that only one need be in memory.
        files: The FileSystem to write to.

    Returns:
        The file's size in bytes, and the SHA-256 of its content, in hexadecimal.
    """
    digest = hashlib.sha256()
    size = 0
    with files.create(path) as file:
        for block in blocks:
            for first in range(0, len(block), _CHUNK_BYTES):
                chunk = block[first : first + _CHUNK_BYTES]
                files.write(file, chunk)
                digest.update(chunk)
            size += len(block)
        files.sync(file)
    return size, digest.hexdigest()


def remove_tree(path: Path, files: FileSystem) -> None:
    """Remove a directory and all that it holds; remove links and do not follow them."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child, files)
        else:
            files.remove_file(child)
    files.remove_directory(path)
