"""What an address asks for: its values, read within limits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.units import finite


@dataclass(frozen=True)
class Query:
    """The values after the question mark of an address, by name.

    Attributes:
        values: The values, as text.
    """

    values: Mapping[str, str] = field(default_factory=dict)

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Return a whole number.

        Raises:
            ConfigError: The value is no whole number, or out of range.
        """
        return int(self._number(name, default, least, most, whole=True))

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number.

        Raises:
            ConfigError: The value is no number, or out of range.
        """
        return self._number(name, default, least, most, whole=False)

    def choice(self, name: str, default: str, possible: Sequence[str]) -> str:
        """Return one of the possible values.

        Raises:
            ConfigError: The value is none of them.
        """
        value = self.values.get(name) or default
        if value not in possible:
            raise ConfigError(
                f"{name}={value[:80]} is not known", possible=", ".join(possible), change="use one of these"
            )
        return value

    def _number(self, name: str, default: float, least: float, most: float, *, whole: bool) -> float:
        text = self.values.get(name) or str(default)
        try:
            value = float(int(text)) if whole else float(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not least <= value <= most:
            raise ConfigError(
                f"{name}={text[:80]} cannot be used",
                possible=f"a {'whole ' if whole else ''}number from {least:g} to {most:g}",
                change="give such a number",
            )
        return value


def encode(data: Any) -> str:
    """Return data as JSON that a browser reads, also inside of a script element of an HTML page."""
    return (
        json.dumps(finite(data), allow_nan=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


MOST_POINTS = 2000
"""Most points that one answer has of all its series together."""


def thinned(values: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.int64]:
    """Return the positions to show, ascending: the least and the greatest value of equal stretches.

    The first and the last position are always among them. Values that are not finite count as gaps, and are
    left out.

    Args:
        values: The series, `[n]`.
        most: Most positions to return, 4 or more.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= most:
        return finite
    stretches = np.array_split(finite, (most - 2) // 2)
    chosen = {int(finite[0]), int(finite[-1])}
    for stretch in stretches:
        inside = values[stretch]
        chosen |= {int(stretch[inside.argmin()]), int(stretch[inside.argmax()])}
    return np.array(sorted(chosen), dtype=np.int64)
