"""What a row of the acceptance run is, and what became of it. Nothing here imports torch or Shoal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["OUTCOMES", "Found", "Lacking", "Line", "Row", "Short", "newest", "read_lines"]

OUTCOMES = {
    "wrong": "a result differs from its reference",
    "failed": "the row ended with an error",
    "hung": "the row did not end within its budget, and was killed",
    "no memory": "the row took all memory of the device, or too much of the host's",
    "short": "right, and short of its target",
    "lacking": "something is not installed",
    "not run": "its budget did not fit into the time that was left",
    "right": "right, and on target",
}
"""Outcomes, the worst first."""


@dataclass(frozen=True, slots=True)
class Row:
    """A check or a measurement: a process of its own, with a limit.

    Attributes:
        name: Its name.
        subject: The section of the page that shows it.
        seconds: Its budget: after this time it is killed.
        function: `module:function` in this folder. It gets the device, returns or yields findings, each a
            text or a `Found`, and raises AssertionError if a result is wrong.
        arguments: What else it gets, by name.
        needs: Packages that it needs, other than those that Shoal requires.
    """

    name: str
    subject: str
    seconds: float
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A finding: a sentence, and its figures by name, with the unit in the name."""

    text: str
    figures: Mapping[str, float] = field(default_factory=dict)


class Short(Exception):  # noqa: N818
    """A figure is right, and misses its target."""


class Lacking(Exception):  # noqa: N818
    """The row needs something that is not here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of JSON: what became of a row.

    Attributes:
        number: The row's number in the table, from 1.
        name, subject: The row's.
        outcome: One of `OUTCOMES`.
        seconds: Time that it took.
        budget: Its budget in seconds.
        findings: What it found, also before it failed: `[text, figures]` each.
        reason: Why the outcome is not "right"; empty if it is.
        log: The last lines that it printed, if it did not go well.
        date: When it ended, UTC.
        commit, machine: What ran, and where.
    """

    number: int
    name: str
    subject: str
    outcome: str
    seconds: float
    budget: float
    findings: tuple[tuple[str, Mapping[str, float]], ...] = ()
    reason: str = ""
    log: tuple[str, ...] = ()
    date: str = ""
    commit: str = ""
    machine: str = ""

    def json(self) -> str:
        """This line."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> Line:
        """Return the line that a text holds."""
        content = json.loads(text)
        findings = tuple((each, dict(figures)) for each, figures in content.pop("findings"))
        return cls(findings=findings, log=tuple(content.pop("log")), **content)


def read_lines(file: Path) -> list[Line]:
    """Return the lines of a file, without a torn last one; none if there is no file."""
    if not file.is_file():
        return []
    *whole, torn = file.read_text(encoding="utf-8").split("\n")
    lines = [Line.parse(each) for each in whole if each.strip()]
    if torn.strip():
        with contextlib.suppress(ValueError):
            lines.append(Line.parse(torn))
    return lines


def newest(lines: Iterable[Line]) -> list[Line]:
    """Return the newest line of each row, in the table's order; a row that ran counts as it ran."""
    found: dict[str, Line] = {}
    for line in lines:
        before = found.get(line.name)
        if before is None or line.outcome != "not run" or before.outcome == "not run":
            found[line.name] = line
    return sorted(found.values(), key=lambda line: line.number)
