"""Finds the files of the sources that a configuration names."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from shoal.data.remote import find_remote, is_url
from shoal.data.table import PREFIX, Table, open_table
from shoal.errors import DataError, nearest

STANDARD_LIBRARY = "stdlib"
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "_bundled", "__pycache__"})
"""Folders below the standard library that are not part of it; `_bundled` is where ensurepip keeps pip."""


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus, as it was when it was found."""

    path: Path
    """Absolute path; of a remote file, its name there."""
    name: str
    """Path below the folder that was given, which does not change when the folder moves."""
    size: int
    """Size in bytes."""
    modified: int
    """Time of the last change, in nanoseconds since the epoch; of a remote file, a number that changes."""
    table: Table | None = field(default=None, compare=False, repr=False)
    """The split that this is, with the size and time of its files; None for a file."""
    part: tuple[int, int] | None = None
    """The part that is read, from one number to below another: of bytes in text, .jsonl and .tsv files, of
    row groups in .parquet files, of rows in a split, of ids in .npy and .bin files; None for all.
    """
    url: str = ""
    """Where a remote file is; "" for a file of this machine."""

    @property
    def place(self) -> str:
        """Path or URL, for messages."""
        return self.url or str(self.path)


def find_files(sources: Collection[str], suffixes: Collection[str]) -> list[SourceFile]:
    """Return the files that `sources` name, in an order that depends on their names only.

    Files of a folder are found at any depth, and sorted by their path below it. Empty files of a folder
    are left out, and so are files and folders whose name starts with a dot.

    Args:
        sources: Paths of files or folders; "stdlib" is Python's own standard library, "datasets:PATH" a
            dataset of the package `datasets`, and a URL such as s3://bucket/texts a remote file or folder.
        suffixes: Suffixes of the files of a folder that are read.

    Raises:
        DataError: A source is missing, unreadable, or holds nothing to read.
        MissingExtraError: A dataset or a remote file needs an optional package.
    """
    return [file for source in sources for file in _find_in(source, suffixes)]


def _find_in(source: str, suffixes: Collection[str]) -> list[SourceFile]:
    if source == STANDARD_LIBRARY:
        return _find_in_folder(Path(sysconfig.get_path("stdlib")), source, [".py"], _NOT_STANDARD)
    if source.startswith(PREFIX):
        table = open_table(source)
        found = [file.stat() for file in table.files]
        size, modified = sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)
        return [SourceFile(table.path, table.name, size, modified, table)]
    if is_url(source):
        return [
            SourceFile(Path(found.name), found.name, found.size, found.version, url=found.url)
            for found in find_remote(source, suffixes)
        ]
    path = Path(os.path.expanduser(source)).absolute()
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise DataError(
            f"the data source {source!r} does not exist{_nearest_path(path, source)}",
            possible=f"a file, a folder, or {STANDARD_LIBRARY!r}",
            change="correct the path",
        ) from error
    except OSError as error:
        raise _unreadable(source, error) from error
    if stat.S_ISDIR(status.st_mode):
        return _find_in_folder(path, source, suffixes, frozenset())
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"the data source {source!r} is neither a file nor a folder",
            possible="a file or a folder; a pipe cannot be read again when training resumes",
            change="write the data into a file first",
        )
    if status.st_size == 0:
        raise DataError(
            f"the data source {source!r} is empty",
            possible="a file that holds text or tokens",
            change="give another file",
        )
    return [SourceFile(path, path.name, status.st_size, status.st_mtime_ns)]


def _find_in_folder(
    folder: Path, source: str, suffixes: Collection[str], left_out: Collection[str]
) -> list[SourceFile]:
    def stop(error: OSError) -> None:
        raise _unreadable(source, error) from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if name.startswith(".") or path.suffix not in suffixes or not path.is_file():
                continue
            status = path.stat()
            if status.st_size:
                below = path.relative_to(folder).as_posix()
                files.append(SourceFile(path, below, status.st_size, status.st_mtime_ns))
    if not files:
        raise DataError(
            f"the data source {source!r} holds no file with text in it",
            possible="a folder with files that are not empty and end in " + ", ".join(suffixes),
            change="give another folder, or name its suffixes in data.suffixes",
        )
    return sorted(files, key=lambda file: file.name)


def _unreadable(source: str, error: OSError) -> DataError:
    return DataError(
        f"the data source {source!r} cannot be read: {error.strerror}",
        possible="files and folders that this user may read",
        change="correct the permissions, or give another source",
    )


def _nearest_path(path: Path, source: str) -> str:
    beside = os.listdir(path.parent) if os.access(path.parent, os.R_OK | os.X_OK) else []
    return nearest(path.name, beside) or nearest(source, [STANDARD_LIBRARY])
