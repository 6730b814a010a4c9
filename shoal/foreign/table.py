"""A table of operations as a Timeline: a row for each operation of a rank in a step.

Columns, with other names that are understood, such as those of ByteDance's traces (arXiv:2505.05713):

    rank                            or stage and dp_rank, and tp_rank if there is one
    step                            the index of the step
    kind (optype, op, name)         such as forward-compute, backward-send, grads-reduce-scatter, optimizer
    start (start_ts)                seconds
    end (end_ts), or duration       seconds
    stage, dp_rank, microbatch (micro_batch, mb_id), gmc (the virtual stage in the whole model)

Capitals and white space in names of columns do not matter. Times are in another unit if the name says so:
`start_us`, `duration (ms)`. If starts count from the start of each step, steps are laid one after another.

A table may be larger than memory: of more than a million rows the newest steps are kept, at least 32 of them.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from shoal.errors import MissingExtraError, RunError
from shoal.foreign.joined import Joined
from shoal.foreign.operation import Operation
from shoal.lines import bounded_lines
from shoal.timeline import Timeline

_NAMES: dict[str, tuple[str, ...]] = {
    "rank": ("rank", "global_rank"),
    "step": ("step", "iteration", "iter"),
    "kind": ("kind", "optype", "op_type", "op", "operation", "name"),
    "start": ("start", "start_ts", "start_time", "begin", "ts"),
    "end": ("end", "end_ts", "end_time", "stop"),
    "duration": ("duration", "dur"),
    "stage": ("stage", "pp_rank", "pp_stage"),
    "dp": ("dp_rank",),
    "tp": ("tp_rank",),
    "microbatch": ("microbatch", "micro_batch", "micro-batch", "microbatch_id", "mb_id"),
    "chunk": ("gmc",),
}
_UNIT = re.compile(r"[\s_]*[\[(]?(s|sec|seconds|ms|us|µs|ns)[\])]?$")
_SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_TIMES = ("start", "end", "duration")
_ENOUGH_ROWS = 1_000_000
_MOST_ROWS = 5_000_000
_FEWEST_STEPS = 32
_LONGEST_STEP = 86_400.0  # seconds


def read_table(path: Path, tell: Callable[[str], object]) -> Timeline:
    """Read a CSV or Parquet table.

    Args:
        path: The table.
        tell: Gets a sentence if only a part of a large table is used.

    Raises:
        RunError: A column is missing, a value cannot be read, or a step has too many rows.
        MissingExtraError: Parquet needs the package `pyarrow`.
    """
    newest = _Newest(path)
    for row in _rows(path):
        newest.add(row)
    if not newest.by_step:
        raise RunError(
            f"{path} has no rows",
            possible="a table with a row for each operation",
            change="give another table",
        )
    if newest.dropped is not None:
        tell(f"{path} has more rows than are used: those of step {min(newest.by_step)} and later are")
    rows = _one_after_another(path, [row for rows in newest.by_step.values() for row in rows])
    newest.by_step.clear()
    return Timeline(Joined(rows).spans())


class _Newest:
    """The rows of the newest steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self.by_step: dict[int, list[Operation]] = {}
        self.dropped: int | None = None  # the newest step without rows here

    def add(self, row: Operation) -> None:
        """Take a row; drop the oldest step if there are too many."""
        if self.dropped is not None and row.step <= self.dropped:
            return
        self.by_step.setdefault(row.step, []).append(row)
        self._count += 1
        while self._count > (_ENOUGH_ROWS if len(self.by_step) > _FEWEST_STEPS else _MOST_ROWS):
            if len(self.by_step) == 1:
                raise RunError(
                    f"step {row.step} of {self._path} has more than {_MOST_ROWS:,} rows",
                    possible="steps up to this size",
                    change="leave out operations or ranks",
                )
            self.dropped = min(self.by_step)
            self._count -= len(self.by_step.pop(self.dropped))


def _rows(path: Path) -> Iterator[Operation]:
    """Yield the operations; the message of an error names the row."""
    columns: dict[str, tuple[str, float]] | None = None
    ranks: dict[tuple[int, int, int], int] = {}
    for number, fields in enumerate(_records(path), start=1):
        if columns is None:
            columns = _columns(path, fields)
        try:
            yield _operation(fields, columns, ranks)
        except (TypeError, ValueError, OverflowError) as error:
            raise RunError(
                f"row {number} of {path} is not an operation: {error}",
                possible="whole numbers for ranks and steps, seconds for times, and an end after the start",
                change="correct or remove the row",
            ) from error


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of the file as they are, some at a time."""
    try:
        if path.name.endswith(".csv"):
            yield from csv.DictReader(bounded_lines(path))
            return
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise MissingExtraError("reading parquet", package="pyarrow", extra="parquet") from error
        try:
            with parquet.ParquetFile(path) as table:
                columns = [name for name in table.schema_arrow.names if _meaning(name) is not None]
                for batch in table.iter_batches(columns=columns):
                    yield from batch.to_pylist()
        except ArrowException as error:
            raise _unreadable(path, error) from error
    except (OSError, csv.Error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> RunError:
    return RunError(
        f"{path} cannot be read: {error}",
        possible="a whole CSV file in UTF-8, or a whole Parquet file",
        change="copy or write the file again",
    )


def _meaning(column: object) -> tuple[str, int, float] | None:
    """Return what a column means, its place among columns that mean this, and its unit in seconds."""
    given = str(column).strip().lower().replace(" ", "_")
    for meaning, names in _NAMES.items():
        if given in names:
            return meaning, names.index(given), 1.0
        unit = _UNIT.search(given)
        if meaning in _TIMES and unit is not None and (name := given[: unit.start()]) in names:
            return meaning, names.index(name), _SECONDS[unit[1]]
    return None


def _columns(path: Path, fields: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return the columns of the table by what they mean, with their units."""
    found: dict[str, tuple[int, str, float]] = {}
    for column in fields:
        if (meant := _meaning(column)) is not None:
            meaning, place, unit = meant
            if meaning not in found or place < found[meaning][0]:
                found[meaning] = place, column, unit
    missing = [name for name in ("step", "kind", "start") if name not in found]
    if "end" not in found and "duration" not in found:
        missing.append("end or duration")
    if "rank" not in found and "stage" not in found and "dp" not in found:
        missing.append("rank")
    if missing:
        raise RunError(
            f"{path} has no column {', '.join(missing)}; its columns are {', '.join(map(str, fields))}",
            possible="the columns rank, step, kind, start, and end or duration",
            change="rename the columns",
        )
    return {meaning: (column, unit) for meaning, (_, column, unit) in found.items()}


def _operation(
    fields: Mapping[str, Any],
    columns: Mapping[str, tuple[str, float]],
    ranks: dict[tuple[int, int, int], int],
) -> Operation:
    def value(meaning: str) -> Any:
        return fields[columns[meaning][0]] if meaning in columns else None

    def seconds(meaning: str) -> float:
        column, unit = columns[meaning]
        return float(fields[column]) * unit

    stage, dp, tp = (_number(value(name)) or 0 for name in ("stage", "dp", "tp"))
    if "rank" in columns:
        rank = int(float(value("rank")))
    else:
        rank = ranks.setdefault((stage, dp, tp), len(ranks))
    start = seconds("start")
    has_end = "end" in columns and value("end") not in (None, "")
    stop = seconds("end") if has_end else start + seconds("duration")
    if not (math.isfinite(start) and math.isfinite(stop) and stop >= start and rank >= 0):
        raise ValueError(f"rank {rank} from {start} to {stop}")
    chunk = _number(value("chunk"))
    return Operation(
        rank=rank,
        step=int(float(value("step"))),
        kind=sys.intern(str(value("kind")).strip().lower().replace("_", "-")),
        start=start,
        stop=stop,
        stage=stage,
        dp=dp,
        microbatch=_number(value("microbatch")),
        chunk=stage if chunk is None else chunk,
    )


def _number(value: Any) -> int | None:
    """Return a whole number; None for an empty cell."""
    return None if value is None or value == "" or value != value else int(float(value))


def _one_after_another(path: Path, rows: Sequence[Operation]) -> list[Operation]:
    """Return the rows on one axis of time, by start; starts may count from the start of each step."""
    windows: dict[int, tuple[float, float]] = {}
    for row in rows:
        first, last = windows.get(row.step, (row.start, row.stop))
        windows[row.step] = min(first, row.start), max(last, row.stop)
    steps = sorted(windows)
    usual = median(last - first for first, last in windows.values())
    if usual > _LONGEST_STEP:
        raise RunError(
            f"a step of {path} would take {usual:,.0f} s, so its times are hardly in seconds",
            possible="times in seconds, or columns that name their unit, such as start_us and duration_us",
            change="rename the columns of times",
        )
    overlapping = sum(
        windows[after][0] < (windows[before][0] + windows[before][1]) / 2
        for before, after in itertools.pairwise(steps)
    )
    shift = dict.fromkeys(steps, 0.0)
    if overlapping > (len(steps) - 1) / 2:
        now = 0.0
        for step in steps:
            first, last = windows[step]
            shift[step] = now - first
            now += last - first
    moved = (replace(row, start=row.start + shift[row.step], stop=row.stop + shift[row.step]) for row in rows)
    return sorted(moved, key=lambda row: row.start)
