"""Keeps token streams on disk between runs.

An entry is one file: a header of fixed size, which is JSON filled up with spaces, then the tokens as they
are memory-mapped. It is written under another name and renamed when it is complete and on disk, so that a
file with an entry's name is a whole entry, unless the disk or another program damaged it; then its
header or its size does not fit, and it counts as absent. Writers of one entry take turns on a lock. Where
locks do not reach another host, each writes a file of its own, and the last one counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shoal.data.token_writer import StreamInfo

_HEADER_BYTES = 1 << 16  # pages, so that the tokens are aligned for any dtype; holds the names of classes
_LEFT = 600.0  # seconds without a change after which an unfinished file was left by a writer that is gone

Entry = tuple[StreamInfo, NDArray[np.integer]]


def default_directory() -> Path:
    """Return $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal.

    Raises:
        OSError: No variable names a directory, and this user has no home.
    """
    if given := os.environ.get("SHOAL_CACHE"):
        return Path(given)
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "shoal"
    try:
        return Path.home() / ".cache" / "shoal"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def read_or_write_entry(
    directory: Path,
    key: str,
    write: Callable[[BinaryIO, BinaryIO], StreamInfo],
    *,
    lock: str = "",
    wait: bool = True,
) -> Entry:
    """Return the entry `key`; `write` makes it if it is not there.

    Any number of processes may call this at the same moment: one writes, and the others wait for it.

    Args:
        directory: Directory of the entries; made if it is missing.
        key: Name of the data and of the way it was tokenized; safe as a file name.
        write: Function that writes the tokens to the first file, from its current position. The second file
            is for its own use.
        lock: Name of the lock, which several entries may share; by default the entry has its own.
        wait: Whether to wait for a process that writes the entry.

    Raises:
        OSError: The directory cannot be used, or is full; nothing half-written is left.
        BlockingIOError: Another process has the lock, and `wait` is False.
    """
    path = directory / f"{key}.tokens"
    entry = _read_entry(path, key)
    if entry is None:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / f"{lock or key}.lock", wait):
            entry = _read_entry(path, key)  # another process may have written it by now
            if entry is None:
                _write_entry(path, key, write)
                entry = _read_entry(path, key)
    if entry is None:
        raise OSError(f"{path} did not read back as it was written")
    return entry


def _read_entry(path: Path, key: str) -> Entry | None:
    """Return the entry, or None if it is not there, not whole, or no entry."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            if header.pop("key") != key:
                return None
            info = StreamInfo(**header)
            dtype = np.dtype(info.dtype)
            size = 0 if info.is_mapped else info.tokens * dtype.itemsize
            if os.fstat(file.fileno()).st_size != _HEADER_BYTES + size:
                return None
            if not size:
                return info, np.empty(0, dtype)
            return info, np.memmap(file, dtype=dtype, mode="r", offset=_HEADER_BYTES)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write_entry(path: Path, key: str, write: Callable[[BinaryIO, BinaryIO], StreamInfo]) -> None:
    # Names differ, so that two hosts whose locks do not meet write no file together.
    for left in path.parent.glob(f"{key}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT:
                left.unlink()
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        with open(unfinished, "xb") as file:
            file.seek(_HEADER_BYTES)
            with tempfile.TemporaryFile(dir=path.parent) as second:
                info = write(file, second)
            header = json.dumps({"key": key, **asdict(info)}).encode().ljust(_HEADER_BYTES)
            if len(header) > _HEADER_BYTES:
                raise OSError(f"its description takes more than {_HEADER_BYTES} bytes")
            file.seek(0)
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
        os.rename(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _lock(path: Path, wait: bool) -> Iterator[None]:
    """Hold a lock that one process at a time has; the system releases it if that process dies."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
