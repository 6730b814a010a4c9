"""What a row of the acceptance run is, and what became of it. Nothing here imports torch or Shoal."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "NOT_BEGUN",
    "OUTCOMES",
    "STOPPED",
    "Found",
    "Lacking",
    "Line",
    "Row",
    "Short",
    "newest",
    "read_lines",
]

OUTCOMES = {
    "wrong": "a result differs from its reference",
    "failed": "the row ended with an error",
    "hung": "the row did not end within its budget, and was killed",
    "no memory": "the row took all memory of the device, or too much of the host's",
    "short": "right, and short of its target",
    "lacking": "something is not installed",
    "not run": "there was no time for it, or the run was stopped",
    "right": "right, and on target",
}
"""Outcomes, the worst first."""

STOPPED = "stopped by a signal"
"""Why a row was not run, or not to its end."""

NOT_BEGUN = ("lacking", "not run")
"""Outcomes of rows that have shown nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """A check or a measurement: a process of its own, with a limit.

    Attributes:
        name: Its name: a word, which may have hyphens.
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

    @classmethod
    def of(cls, number: int, row: Row, outcome: str, reason: str = "", **more: Any) -> Line:
        """Return the line of a row; `more` are further fields."""
        assert outcome in OUTCOMES
        fields = {"name": row.name, "subject": row.subject, "seconds": 0.0, "budget": row.seconds, **more}
        return cls(number=number, outcome=outcome, reason=reason, **fields)

    def json(self) -> str:
        """This line, in ASCII."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> Line:
        """Return the line that a text holds.

        Raises:
            ValueError: It holds none, or one of another release.
        """
        try:
            content = json.loads(text)
            findings = tuple(
                (str(each), {str(name): float(value) for name, value in figures.items()})
                for each, figures in content.pop("findings")
            )
            line = cls(findings=findings, log=tuple(map(str, content.pop("log"))), **content)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"no line of the acceptance run: {error}") from error
        texts = (line.name, line.subject, line.outcome, line.reason, line.date, line.commit, line.machine)
        numbers = (line.number, line.seconds, line.budget)
        is_typed = all(isinstance(each, str) for each in texts)
        is_typed &= all(isinstance(each, int | float) for each in numbers)
        if not is_typed or line.outcome not in OUTCOMES:
            raise ValueError("no line of the acceptance run: a value is of another kind")
        return line


def read_lines(file: Path) -> list[Line]:
    """Return the lines of a file; none if there is no file. What is no line is left out, and counted."""
    if not file.is_file():
        return []
    lines, strange = list[Line](), list[int]()
    for number, text in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if text.strip():
            try:
                lines.append(Line.parse(text))
            except ValueError:
                strange.append(number)
    if strange:
        shown = ", ".join(map(str, strange[:5])) + (", ..." if len(strange) > 5 else "")
        print(f"gpu: {file} holds no result in line {shown}: left out", file=sys.stderr)
    return lines


def newest(lines: Iterable[Line]) -> list[Line]:
    """Return the newest line of each row, in the table's order; one that has shown something comes first."""
    found: dict[str, Line] = {}
    for line in lines:
        before = found.get(line.name)
        if before is None or line.outcome not in NOT_BEGUN or before.outcome in NOT_BEGUN:
            found[line.name] = line
    return sorted(found.values(), key=lambda line: line.number)
