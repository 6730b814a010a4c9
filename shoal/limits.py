"""Limits on what Shoal reads from files and texts of others, so that no input can use up memory or the stack.

Readers report a ValueError of these functions in their own named error, with the file that was given.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
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
    "json_of",
    "read_limited",
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
        content = file.read(most + 1)
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


def toml_of(content: bytes) -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises:
        ValueError: It is not TOML in UTF-8, or nested too deeply.
    """
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
