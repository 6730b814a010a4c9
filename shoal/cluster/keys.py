"""Units and examples of the keys in a Cluster's file, for messages, comments and the reference page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, get_type_hints

SHARE = "share, 0 to 1"
DOLLARS = "dollars for a device and hour"
PER_HOUR = "for a device and hour"


class Key(NamedTuple):
    """How the value of a field is written, as `Annotated[float, Key("bytes/s", "55e9")]` says.

    Attributes:
        unit: Unit of the value, or what kind of thing it is.
        example: A value in TOML.
    """

    unit: str
    example: str


@cache
def keys_of(kind: type) -> Mapping[str, Key]:
    """Return how each field of a class is written, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}
