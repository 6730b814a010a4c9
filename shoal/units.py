"""Bytes, seconds, FLOP and their text forms.

Memory is binary (KiB, MiB), rates are decimal (GB/s), time is in seconds.
"""

from __future__ import annotations

import math
import re
from typing import Any

__all__ = [
    "exact_bytes",
    "finite",
    "format_bytes",
    "format_count",
    "format_seconds",
    "parse_bytes",
    "parse_count",
    "parse_steps",
]

_BINARY = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BYTES_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?")


def parse_bytes(text: str) -> int:
    """Reads "25MiB", "1.5 GiB" or a plain number of bytes.

    Raises:
        ValueError: The text is not a size in binary units.
    """
    match = _BYTES_TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write sizes as 512, 64KiB, 25MiB or 1GiB")
    return int(float(match[1]) * _BINARY[match[2] or "B"])


def format_bytes(count: int) -> str:
    """Writes a size so that it reads well, rounded to four digits; `exact_bytes` does not round.

    >>> format_bytes(26214400), format_bytes(1536)
    ('25MiB', '1.5KiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _BINARY[unit]:
            return f"{count / _BINARY[unit]:.4g}{unit}"
    return f"{count}B"


def exact_bytes(count: int) -> str:
    """Writes a size so that `parse_bytes` gives the same number.

    >>> exact_bytes(26214400), exact_bytes(2416)
    ('25MiB', '2416B')
    """
    text = format_bytes(count)
    return text if parse_bytes(text) == count else f"{count}B"


def format_seconds(seconds: float) -> str:
    """Writes a duration with a unit that suits it.

    >>> format_seconds(0.0421), format_seconds(75)
    ('42.1 ms', '1 min 15 s')
    """
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def format_count(count: float) -> str:
    """Writes a large count in decimal thousands.

    >>> format_count(12_582_912), format_count(960)
    ('12.6 M', '960')
    """
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.3g}"


def parse_steps(text: str) -> tuple[int, int]:
    """Reads "100:105" or "100": the first and the last of some steps.

    >>> parse_steps("100:105"), parse_steps("7")
    ((100, 105), (7, 7))

    Raises:
        ValueError: The text names no steps.
    """
    first, colon, last = text.strip().partition(":")
    if not (first.isdecimal() and (last.isdecimal() or not colon)):
        raise ValueError(f"{text!r} names no steps; write FIRST:LAST, such as 100:105, or one number")
    steps = int(first), int(last or first)
    if steps[0] > steps[1]:
        raise ValueError(f"{text!r} ends before it begins; write FIRST:LAST, such as 100:105")
    return steps


def parse_count(text: str) -> float:
    """Reads "15T", "300 B", "1.5M", "1e12" or a plain number, in decimal thousands.

    Raises:
        ValueError: The text is not a count.
    """
    number, scale = text.strip(), 1.0
    if number[-1:] in _DECIMAL:
        number, scale = number[:-1], _DECIMAL[number[-1]]
    try:
        return float(number) * scale
    except ValueError:
        raise ValueError(f"{text!r} is not a count; write counts as 15T, 300B, 1.5M or 1e12") from None


def finite(value: Any) -> Any:
    """Return values for JSON, which has no infinity and no NaN: None in their place, at any depth."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
