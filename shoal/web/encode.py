"""JSON for browsers: numbers that are not finite become null, and nothing can end the element around it."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["encode"]


def encode(data: Any) -> str:
    """Return data as JSON that a browser reads, also inside of a script element of an HTML page."""
    return (
        json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
