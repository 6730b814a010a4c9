"""Runs the bench on every rank: enters the contestants, measures, and on rank 0 reports."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from shoal.bench.contestants import enter
from shoal.bench.machine import describe
from shoal.bench.measure import measure
from shoal.bench.plot import plot
from shoal.bench.report import Facts
from shoal.bench.row import Row
from shoal.bench.settings import Settings
from shoal.bench.world import Ranks
from shoal.errors import CommunicationError

Report = Callable[[Iterable[tuple[Row, ...]], Facts], None]


def run(settings: Settings, ranks: Ranks, report: Report, picture: Path | None) -> None:
    """Measure, within the default group of the ranks.

    Args:
        settings: What to measure.
        ranks: This rank and the number of ranks.
        report: Function that iterates over the measurements and prints them, on rank 0.
        picture: The file to plot to, if any.

    Raises:
        CommunicationError: On rank 0, after the report: a result was wrong.
    """
    torch.set_num_threads(1)
    contestants = {
        name: enter(name, algorithms=settings.algorithms, local_rank=ranks.local_rank)
        for name in settings.backends
    }
    rows: list[Row] = []

    def measured() -> Iterable[tuple[Row, ...]]:
        for point in measure(settings, contestants, ranks):
            rows.extend(point)
            yield point

    if ranks.rank != 0:
        for _ in measured():
            pass
        return
    versions = {name: contestant.version() for name, contestant in contestants.items()}
    report(measured(), Facts(settings=settings, ranks=ranks.count, machine=describe(), versions=versions))
    if picture is not None:
        plot(rows, picture)
        print(f"plot written to {picture}", file=sys.stderr)
    if wrong := sum(row.wrong or 0 for row in rows):
        raise CommunicationError(f"{wrong} elements of results are wrong; see the lines below the tables")


@contextlib.contextmanager
def stdout_for_data() -> Iterator[None]:
    """Within this context, send the output of native libraries to stderr, so that only Python uses stdout."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as data:
        os.dup2(2, 1)
        try:
            with contextlib.redirect_stdout(data):
                yield
        finally:
            data.flush()
            os.dup2(data.fileno(), 1)
