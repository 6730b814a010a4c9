"""Finds and reads files of remote file systems, through fsspec: object stores, web servers and others.

Nothing is copied to this machine: a file is read from a place on, in blocks, and only as far as it is needed.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any, BinaryIO, final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError, MissingExtraError, UserError

_BLOCK = 1 << 20  # bytes that are read at a time
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
"""What file systems say about a file that changes with it."""


def is_url(text: str) -> bool:
    """Return whether a text names a remote file or folder, such as s3://bucket/texts, and not a path."""
    return "://" in text


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that was found.

    Attributes:
        url: Where it is.
        name: Path below the folder that was given.
        size: Size in bytes.
        version: A number that changes with the file, as far as its file system tells.
    """

    url: str
    name: str
    size: int
    version: int


def find_remote(source: str, suffixes: Collection[str]) -> list[RemoteFile]:
    """Return the file that a URL names, or the files in the folder that it names, sorted by name.

    Args:
        source: The URL.
        suffixes: Suffixes of the files of a folder that are read.

    Raises:
        DataError: There is none, or they cannot be listed.
        MissingExtraError: The package for this kind of URL is not installed.
    """
    files, root = _file_system(source)
    root = root.rstrip("/")
    with naming_remote(source):
        found: Mapping[str, Mapping[str, Any]] = files.find(root, detail=True)
    below = {}
    for path, about in found.items():
        name = path.rstrip("/").removeprefix(root).strip("/")
        is_whole = not name  # the URL names this file
        place = PurePosixPath(name or path)
        is_hidden = any(part.startswith(".") for part in place.parts)
        if about.get("size") is None:
            raise DataError(
                f"{source!r} does not tell the size of {str(place)!r}",
                possible="a file system that tells the sizes of files",
                change="copy the file to this machine",
            )
        if is_whole or (about["size"] and not is_hidden and place.suffix in suffixes):
            below[place.name if is_whole else name] = path, about
    if not below or not any(about["size"] for _, about in below.values()):
        raise DataError(
            f"the data source {source!r} does not exist, or holds no file with text in it",
            possible="a file that is not empty, or a folder with files that end in " + ", ".join(suffixes),
            change="correct the URL, or name its suffixes in data.suffixes",
        )
    return [
        RemoteFile(files.unstrip_protocol(path), name, int(about["size"]), _version(about))
        for name, (path, about) in sorted(below.items())
    ]


def open_remote(url: str) -> BinaryIO:
    """Open a file for reading; close it."""
    files, path = _file_system(url)
    with naming_remote(url):
        return io.BufferedReader(files.open(path, "rb", block_size=_BLOCK), _BLOCK)


@contextmanager
def naming_remote(url: str) -> Iterator[None]:
    """Turn an error of a file system into a DataError that names the URL; each has errors of its own."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            f"the data at {url!r} cannot be read: {type(error).__name__}: {error}",
            possible="a file or folder that this user may read, and a network",
            change="correct the URL, or the credentials in the environment",
        ) from error


@final
class RemoteIds:
    """The ids of a remote file, of which only what is asked for is read.

    Args:
        url: Where the file is.
        dtype: Type of the ids.
        offset: Bytes before the first id.
        length: Number of ids.
    """

    def __init__(self, url: str, dtype: np.dtype[Any], offset: int, length: int) -> None:
        self._url = url
        self._offset = offset
        self._length = length
        self.dtype = dtype

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> NDArray[np.integer]:
        first, last, _ = places.indices(self._length)
        with naming_remote(self._url), open_remote(self._url) as file:
            file.seek(self._offset + first * self.dtype.itemsize)
            return np.frombuffer(file.read((last - first) * self.dtype.itemsize), dtype=self.dtype)


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    try:
        from fsspec.core import url_to_fs  # slow to import
    except ImportError as error:
        raise MissingExtraError(f"the data at {url}", package="fsspec", extra="store") from error
    kind = url.partition("://")[0]
    try:
        files, path = url_to_fs(url)
    except ImportError as error:
        if kind == "s3":
            raise MissingExtraError("data of the kind s3", package="s3fs", extra="store") from error
        raise DataError(
            f"{url!r} needs a package: {error}",
            possible="file systems whose packages are installed",
            change="install the package, or copy the data to this machine",
        ) from error
    except ValueError as error:
        raise DataError(
            f"{url!r} is no file system that is known: {error}",
            possible="a path, or a URL such as s3://bucket/texts or https://host/text.jsonl",
            change="correct the data source",
        ) from error
    return files, path


def _version(about: Mapping[str, Any]) -> int:
    told = [str(about[name]) for name in _VERSIONS if about.get(name) is not None]
    return int.from_bytes(blake2b("|".join(told).encode(), digest_size=7).digest(), "little")
