"""What an address asks for: its values, read within limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import ConfigError


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
