"""One row of the table of `shoal doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """A verdict about one thing, from good to bad. `UNKNOWN`: it could not be read."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARN = "warn"
    BAD = "bad"


_ORDER = list(Verdict)


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with its evidence.

    Attributes:
        row: What was examined, such as "GPU clocks".
        verdict: The verdict.
        found: The evidence, in one sentence with figures.
        change: What to do about it; empty if there is nothing to do.
    """

    row: str
    verdict: Verdict
    found: str
    change: str = ""


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; `OK` if there are no findings."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default=Verdict.OK)
