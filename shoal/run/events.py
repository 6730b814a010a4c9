"""The events of a run: when it was launched, what its time went into, when it failed and ended.

events.jsonl has one JSON object a line. Each has `time`, in seconds since the epoch, and `event`:

    {"time":.., "event":"began", "launched":.., "ranks":8}         a group of ranks formed; `launched` is when
                                                                   the command that started it began
    {"time":.., "event":"loaded", "step":40}                       the ranks hold the state after this step
    {"time":.., "event":"spent", "step":52, "seconds":{"steps":..}}  how the time since the line before was
                                                                   spent, and the last step that was made
    {"time":.., "event":"failed", "reason":".."}                   a failure was noticed
    {"time":.., "event":"ended", "reason":".."}                    the ranks, or their launcher, end

The first rank writes it, and the launcher notes failures and its end. Each line is one write at the end of
the file, so that lines of two processes do not mix. A "spent" line comes after the first step of a
group of ranks, then at most once in a second and in a thousandth of the run's age: a run of a month leaves
some ten thousand lines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.limits import open_regular

Event = dict[str, Any]
"""One event: a JSON object with `time` and `event`."""

_LONGEST_REASON = 500


def write_event(path: Path, event: str, *, at: float | None = None, **values: Any) -> Event:
    """Append an event to a run's file, if the run is there; return the event.

    A full disk loses the event, and stops nothing. A line that another process left torn is ended first.

    Args:
        path: The file of events.
        event: What happened.
        at: When, in seconds since the epoch; by default now.
        values: What else is known of it.
    """
    told: Event = {"time": time.time() if at is None else at, "event": event, **values}
    if "reason" in told:
        told["reason"] = str(told["reason"])[:_LONGEST_REASON]
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(file).st_size
            is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, b"\n" * is_torn + json.dumps(told).encode() + b"\n")
        finally:
            os.close(file)
    return told


def read_events(paths: Iterable[Path]) -> list[Event]:
    """Return the events of some files in the order of their times; see `parse_events`."""
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError), open_regular(path) as file:
            lines += file.read().decode("utf-8-sig", errors="replace").splitlines()
    return parse_events(lines)


def parse_events(lines: Iterable[str]) -> list[Event]:
    """Return the events of some lines in the order of their times; lines that cannot be read are left out."""
    found: list[Event] = []
    for line in lines:
        try:
            told = json.loads(line)
            if isinstance(told["event"], str) and math.isfinite(told["time"]):
                found.append(told)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
    return sorted(found, key=lambda told: float(told["time"]))
