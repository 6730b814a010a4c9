"""What parameter servers applied: a line for each contribution of a worker, as `shoal train` writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.limits import json_of
from shoal.lines import bounded_lines


@dataclass(frozen=True, slots=True)
class Applied:
    """One contribution that a server applied.

    Attributes:
        shard: The part of the values.
        update: Updates of that part, with this one.
        worker: Who sent it.
        staleness: Updates, or rounds, that the worker had not heard of when it computed it.
        seconds: When it was applied, in seconds since the epoch.
    """

    shard: int
    update: int
    worker: int
    staleness: int
    seconds: float


def read_updates(paths: Iterable[Path]) -> list[Applied]:
    """Return what servers applied to the first part of the values, in order; a torn last line is left out.

    All parts get the same contributions, so that one of them tells of all.
    """
    found: list[Applied] = []
    for path in paths:
        for line in bounded_lines(path):
            try:
                told = json_of(line)
                applied = Applied(**{name: told[name] for name in Applied.__slots__})
            except (ValueError, KeyError, TypeError):
                continue
            if applied.shard == 0:
                found.append(applied)
    return sorted(found, key=lambda each: each.seconds)
