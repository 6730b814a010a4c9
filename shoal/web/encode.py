"""JSON for browsers: numbers that are not finite become null, and nothing can end the element around it."""

from __future__ import annotations

import json
from typing import Any

from shoal.units import finite


def encode(data: Any) -> str:
    """Return data as JSON that a browser reads, also inside of a script element of an HTML page."""
    return (
        json.dumps(finite(data), allow_nan=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
