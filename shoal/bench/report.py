"""The report of rank 0: lines as they are measured and facts below them, or one JSON object at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from shoal.bench.machine import Machine
from shoal.bench.row import Row
from shoal.bench.settings import Settings
from shoal.bench.table import heading, line


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that hold for all rows.

    Attributes:
        settings: What is measured.
        ranks: Number of ranks.
        machine: The machine that the bench runs on.
        versions: Name and version of each contestant's library, by contestant.
    """

    settings: Settings
    ranks: int
    machine: Machine
    versions: Mapping[str, str]


def report_table(points: Iterable[tuple[Row, ...]], facts: Facts) -> None:
    """Print each size when it is measured, and the facts at the end."""
    shown = None
    remarks: dict[str, None] = {}
    for point in points:
        first = point[0]
        if (first.collective, first.fresh) != shown:
            title = heading(first.collective, facts.settings.backends, facts.ranks, fresh=first.fresh)
            print(("\n" if shown else "") + title)
            shown = first.collective, first.fresh
        print(line(point), flush=True)
        remarks |= dict.fromkeys(remark for row in point if (remark := _remark(row)))
    method = (
        "time: one operation on the slowest rank; "
        f"median and range of {facts.settings.rounds} interleaved rounds"
    )
    print(
        "\n" + "\n".join([*remarks, method, str(facts.machine), "; ".join(facts.versions.values())]),
        flush=True,
    )


def report_json(points: Iterable[tuple[Row, ...]], facts: Facts) -> None:
    """Print one JSON object when all is measured; until then, print the progress on stderr."""
    rows = []
    for point in points:
        what = f"{point[0].collective}, {point[0].bytes} bytes{', fresh' * point[0].fresh}"
        print(f"measured: {what}", file=sys.stderr, flush=True)
        rows += [row.as_json() for row in point]
    content = {
        "machine": asdict(facts.machine),
        "settings": {**asdict(facts.settings), "ranks": facts.ranks},
        "versions": dict(facts.versions),
        "rows": rows,
    }
    print(json.dumps(content, indent=1), flush=True)


def _remark(row: Row) -> str:
    if row.problem:
        return f"{row.backend} does not do {row.collective}: {row.problem}"
    if row.wrong:
        return f"{row.backend} is wrong in {row.collective}, {row.bytes} bytes: {row.wrong} elements"
    return ""
