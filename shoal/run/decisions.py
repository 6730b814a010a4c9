"""What exchange=auto, or the guard of stale gradients, measured and decided: a line for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.limits import json_of
from shoal.lines import bounded_lines


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about the exchange between workers.

    Attributes:
        step: Steps made.
        exchange: The exchange that is followed from then on, as a Plan's settings.
        reason: Why, in a sentence.
        numbers: What it rests on, by name.
    """

    step: int
    exchange: str
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"after step {self.step}: {self.exchange}: {self.reason}"


def write_decision(path: Path, decision: Decision) -> None:
    """Add a decision to a run's file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(decision)) + "\n")


def read_decisions(path: Path) -> list[Decision]:
    """Return the decisions of a run, in order; empty without a file. A torn last line is left out."""
    found: list[Decision] = []
    if not path.exists():
        return found
    for line in bounded_lines(path):
        try:
            told = json_of(line)
            found.append(Decision(**{name: told[name] for name in Decision.__slots__}))
        except (ValueError, KeyError, TypeError):
            continue
    return found
