"""The operations that checkpoints need of a disk; each can fail, or be the last before a crash."""

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
    """What is done to the disk, one method an operation, so that tests can stop the world at each.

    Reading is not part of it: a reader that dies changes nothing.
    """

    def make_directory(self, path: Path) -> None:
        """Makes a directory and its parents; one that exists is left as it is."""
        ...

    def create(self, path: Path) -> FileIO:
        """Opens a new, empty, unbuffered file for writing."""
        ...

    def write(self, file: FileIO, data: memoryview) -> None:
        """Writes all of `data`."""
        ...

    def sync(self, file: FileIO) -> None:
        """Returns when the file's content is on the disk."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Returns when the directory's entries are on the disk."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Renames a directory, atomically, to a name that is free."""
        ...

    def remove_file(self, path: Path) -> None:
        """Removes a file."""
        ...

    def remove_directory(self, path: Path) -> None:
        """Removes an empty directory."""
        ...


class RealFiles:
    """The FileSystem that the operating system offers."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory and its parents; one that exists is left as it is."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> FileIO:
        """Opens a new, empty, unbuffered file for writing."""
        return FileIO(path, "w")

    def write(self, file: FileIO, data: memoryview) -> None:
        """Writes all of `data`; the operating system may take it in several parts."""
        while data:
            data = data[file.write(data) :]

    def sync(self, file: FileIO) -> None:
        """Returns when the file's content is on the disk."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Returns when the directory's entries are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Renames a directory, atomically, to a name that is free."""
        source.rename(target)

    def remove_file(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Removes an empty directory."""
        path.rmdir()


REAL_FILES: Final = RealFiles()
"""The default wherever a FileSystem is taken; it holds no state."""


def write_file(path: Path, blocks: Iterator[memoryview], files: FileSystem) -> tuple[int, str]:
    """Writes the bytes of `blocks` to a new file and waits until they are on the disk.

    Args:
        path: The file.
        blocks: Flat views of bytes, produced one at a time so that only one need be in memory.
        files: Where the file is written.

    Returns:
        The file's size in bytes, and the SHA-256 of what was written, in hexadecimal.
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
    """Removes a directory and all that it holds; links are removed, not followed."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child, files)
        else:
            files.remove_file(child)
    files.remove_directory(path)
