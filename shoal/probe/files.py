"""Measure the files of a host: bytes written and read past the page cache, as offloaded state moves."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import time
from pathlib import Path

from shoal.errors import ConfigError
from shoal.probe.turns import Effort

_CHUNK = 8 << 20
_CHUNKS = 16


def measure_files(folder: Path, effort: Effort) -> float:
    """Return the bytes/s of writes and reads together, by turns; of several rounds, the median.

    Args:
        folder: A folder on the file system to measure. A file without a name is made there.
        effort: Amount of measuring.

    Raises:
        ConfigError: No such file can be made, or the file system cannot pass by the page cache.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, _CHUNK) as buffer:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.posix_fallocate(file.fileno(), 0, _CHUNK * _CHUNKS)
            _turn(file.fileno(), buffer)  # reserved space takes longer to write for the first time
            rates = sorted(_turn(file.fileno(), buffer) for _ in range(effort.rounds))
    except OSError as error:
        reason = error.strerror if error.errno != errno.EINVAL else "its file system has no O_DIRECT"
        raise ConfigError(
            f"--files {folder} cannot be measured: {reason}",
            possible="a folder on a local disk, with 128 MiB of space, in which this user may write",
            change="give such a folder to --files",
        ) from error
    return rates[len(rates) // 2]


def _turn(descriptor: int, buffer: mmap.mmap) -> float:
    """Return the bytes/s of writing each chunk and reading it again."""
    began = time.perf_counter()
    for chunk in range(_CHUNKS):
        os.pwritev(descriptor, [buffer], chunk * _CHUNK)
    for chunk in range(_CHUNKS):
        os.preadv(descriptor, [buffer], chunk * _CHUNK)
    return 2 * _CHUNKS * _CHUNK / (time.perf_counter() - began)
