"""The metrics file: one JSON object a line, at least one a step.

    {"step":12,"loss":2.5,"gradient_norm":1.2,"tokens":8192,"step_seconds":0.1,"tokens_per_second":81920.0}
    {"step":12,"validation_loss":2.6}

JSON has no numbers that are not finite; they are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.limits import json_of
from shoal.lines import bounded_lines

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def metrics_line(step: int, values: Mapping[str, float]) -> str:
    """Return the line with the values of a step, and a newline; scalars of any library become floats."""
    writable = {name: json_number(value) for name, value in values.items()}
    return json.dumps({"step": step, **writable}, allow_nan=False, separators=(",", ":")) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the values of each step, with its "step", by ascending step; empty if there is no file.

    Objects of one step are merged: later values replace earlier ones, since a resumed run repeats the steps
    after its checkpoint. Lines that a killed process left torn are skipped.

    Raises:
        ShoalError: A line is whole and is not the object of a step; the message names file and line.
    """
    if not path.exists():
        return []
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(bounded_lines(path), start=1):
        try:
            values = json_of(line)
        except ValueError:
            continue
        if not isinstance(values, dict) or not isinstance(values.get("step"), int):
            raise ShoalError(f'{path}:{number}: not an object with a "step"')
        step = steps.setdefault(values["step"], {})
        step.update((name, _readable(value)) for name, value in values.items())
    return [steps[step] for step in sorted(steps)]


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: a string if it is not finite."""
    if isinstance(value, int):
        return value
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _readable(value: Any) -> Any:
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value
