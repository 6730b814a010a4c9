"""Limits on what Shoal reads from files and texts of others, so that no input can use up memory or the stack.

Readers report a ValueError of these functions in their own named error, with the file that was given.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

from shoal.units import format_bytes

__all__ = [
    "CLUSTER",
    "CONFIGURATION",
    "DESCRIPTION",
    "DIMS",
    "MANIFEST",
    "NUMBER",
    "PLAN",
    "RANKS",
    "NotRegularError",
    "is_inside",
    "json_of",
    "open_regular",
    "read_limited",
    "read_regular",
    "strict_json_of",
    "toml_of",
]

CONFIGURATION = 1 << 20
"""Bytes of a configuration."""
CLUSTER = 4 << 20
"""Bytes of a description of machines."""
DESCRIPTION = 16 << 20
"""Bytes of run.json, of the memory of a rank, and of other files of a run that are one JSON object."""
MANIFEST = 2 << 30
"""Bytes of a checkpoint's manifest: about 20 million pieces."""
PLAN = 4096
"""Characters of a Plan's text."""
NUMBER = 1 << 40
"""Other whole numbers in a Plan, such as micro-batches and bytes."""
RANKS = 1 << 24
"""Ranks of a Plan, and devices of a Cluster."""
DIMS = 64
"""Dims of a tensor in a manifest, which is what torch allows."""


def read_limited(path: str | Path, most: int) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        most: Bytes that it may have.

    Raises:
        OSError: It cannot be read.
        ValueError: It has more bytes.
    """
    with open(path, "rb") as file:
        return _at_most(file.read(most + 1), most)


def read_regular(path: str | Path, most: int) -> bytes:
    """Return the content of a file as `read_limited` does, and refuse what `open_regular` refuses."""
    with open_regular(path) as file:
        content = b""
        while part := file.read(most + 1 - len(content)):
            content += part
        return _at_most(content, most)


class NotRegularError(OSError):
    """What is to be read is no regular file, but for example a directory or a named pipe."""


def open_regular(path: str | Path) -> FileIO:
    """Open a file for reading, unbuffered; links are followed.

    Raises:
        OSError: It cannot be read.
        NotRegularError: It is no regular file: others, such as a named pipe, may never end, and who opens
            them may wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(errno.EINVAL, "is no regular file", str(path))
    return FileIO(descriptor)


def is_inside(name: object) -> bool:
    """Return whether a file's name, which another file gives, stays in the folder that it is relative to."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _at_most(content: bytes, most: int) -> bytes:
    if len(content) > most:
        raise ValueError(f"it has more than {format_bytes(most)}, which is the limit for such a file")
    return content


def json_of(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def strict_json_of(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text; errors as in `json_of`.

    Refuse what Python's reader takes beyond the standard: NaN, infinities, and a name twice in an object,
    which readers understand differently.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r:.80} twice")
    return found


def toml_of(content: bytes) -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises:
        ValueError: It is not TOML in UTF-8, or nested too deeply.
    """
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # some editors begin a file with U+FEFF
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
