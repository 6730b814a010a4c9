"""A table of operations as a Timeline: a row for each operation of a rank in a step.

Columns, with other names that are understood, such as those of ByteDance's traces (arXiv:2505.05713):

    rank                            or stage and dp_rank, and tp_rank if there is one
    step                            the index of the step
    kind (optype, op, name)         such as forward-compute, backward-send, grads-reduce-scatter, optimizer
    start (start_ts)                seconds
    end (end_ts), or duration       seconds
    stage, dp_rank, microbatch (micro_batch, mb_id), gmc (the virtual stage in the whole model)

If starts count from the start of each step, steps are laid one after another. A message joins the stage
before and the stage after; a collective of gradients or parameters joins the ranks of a stage, one of the
embeddings the ranks that have it in a pipeline, and clipping all ranks. The k-th of a kind is the same one
on all its ranks.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import MissingExtraError, RunError
from shoal.foreign.waits import with_waits
from shoal.timeline import Kind, Lane, Purpose, Span, Timeline

__all__ = ["read_table"]

_NAMES: dict[str, tuple[str, ...]] = {
    "rank": ("rank", "global_rank"),
    "step": ("step", "iteration"),
    "kind": ("kind", "optype", "op_type", "op", "name"),
    "start": ("start", "start_ts"),
    "end": ("end", "end_ts"),
    "duration": ("duration", "dur"),
    "stage": ("stage", "pp_rank"),
    "dp": ("dp_rank",),
    "tp": ("tp_rank",),
    "microbatch": ("microbatch", "micro_batch", "micro-batch", "mb_id"),
    "chunk": ("gmc",),
}
_MOST_ROWS = 5_000_000


@dataclass(frozen=True, slots=True)
class _Row:
    """One operation."""

    rank: int
    step: int
    kind: str
    start: float
    stop: float
    stage: int
    dp: int
    microbatch: int | None
    chunk: int


def read_table(path: Path) -> Timeline:
    """Read a CSV or Parquet table.

    Raises:
        RunError: A column is missing, a value cannot be read, or the table is too large.
        MissingExtraError: Parquet needs the package `pyarrow`.
    """
    rows = _one_after_another(list(_rows(path)))
    if not rows:
        raise RunError(
            f"{path} has no rows",
            possible="a table with a row for each operation",
            change="give another table",
        )
    spans = _Joined(rows).spans()
    return Timeline(spans)


def _rows(path: Path) -> Iterator[_Row]:
    """Yield the operations; the message of an error names the row."""
    columns: dict[str, str] | None = None
    ranks: dict[tuple[int, int, int], int] = {}
    for number, fields in enumerate(_records(path), start=1):
        if columns is None:
            columns = _columns(path, fields)
        if number > _MOST_ROWS:
            raise RunError(
                f"{path} has more than {_MOST_ROWS:,} rows",
                possible="tables up to this size",
                change="cut the table to fewer steps",
            )
        try:
            yield _row({name: fields[column] for name, column in columns.items()}, ranks)
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
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                yield from csv.DictReader(file)
            return
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise MissingExtraError("reading parquet", package="pyarrow", extra="parquet") from error
        try:
            with parquet.ParquetFile(path) as table:
                known = {name for names in _NAMES.values() for name in names}
                columns = [name for name in table.schema_arrow.names if name in known]
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


def _columns(path: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of the table by what they mean."""
    columns = {
        meaning: name for meaning, names in _NAMES.items() for name in reversed(names) if name in fields
    }
    missing = [name for name in ("step", "kind", "start") if name not in columns]
    if "end" not in columns and "duration" not in columns:
        missing.append("end or duration")
    if "rank" not in columns and "stage" not in columns and "dp" not in columns:
        missing.append("rank")
    if missing:
        raise RunError(
            f"{path} has no column {', '.join(missing)}; its columns are {', '.join(map(str, fields))}",
            possible="the columns rank, step, kind, start, and end or duration",
            change="rename the columns",
        )
    return columns


def _row(fields: Mapping[str, Any], ranks: dict[tuple[int, int, int], int]) -> _Row:
    stage, dp, tp = (int(float(fields.get(name) or 0)) for name in ("stage", "dp", "tp"))
    if "rank" in fields:
        rank = int(float(fields["rank"]))
    else:
        rank = ranks.setdefault((stage, dp, tp), len(ranks))
    start = float(fields["start"])
    given = fields.get("end")
    stop = start + float(fields["duration"]) if given is None or given == "" else float(given)
    if not (math.isfinite(start) and math.isfinite(stop) and stop >= start and rank >= 0):
        raise ValueError(f"rank {rank} from {start} to {stop}")
    chunk = _number(fields.get("chunk"))
    return _Row(
        rank=rank,
        step=int(float(fields["step"])),
        kind=str(fields["kind"]).strip().lower().replace("_", "-"),
        start=start,
        stop=stop,
        stage=stage,
        dp=dp,
        microbatch=_number(fields.get("microbatch")),
        chunk=stage if chunk is None else chunk,
    )


def _number(value: Any) -> int | None:
    """Return a whole number; None for an empty cell."""
    return None if value is None or value == "" or value != value else int(float(value))


def _one_after_another(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows on one axis of time, by start; starts may count from the start of each step."""
    windows: dict[int, tuple[float, float]] = {}
    for row in rows:
        first, last = windows.get(row.step, (row.start, row.stop))
        windows[row.step] = min(first, row.start), max(last, row.stop)
    steps = sorted(windows)
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
    moved = (
        _Row(
            *(row.rank, row.step, row.kind, row.start + shift[row.step], row.stop + shift[row.step]),
            *(row.stage, row.dp, row.microbatch, row.chunk),
        )
        for row in rows
    )
    return sorted(moved, key=lambda row: row.start)


class _Joined:
    """The rows, and which ranks their communications join."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        self._rows = rows
        self._places = {row.rank: (row.stage, row.dp) for row in rows}
        self._by_place: dict[tuple[int, int], list[int]] = {}
        self._with_kind: dict[str, set[int]] = {}
        for rank, place in self._places.items():
            self._by_place.setdefault(place, []).append(rank)
        for row in rows:
            self._with_kind.setdefault(row.kind, set()).add(row.rank)
        self._stages = 1 + max(stage for stage, _ in self._places.values())

    def spans(self) -> list[Span]:
        """Return the spans of all ranks, with a span for each step and with waits."""
        by_rank: dict[int, list[Span]] = {}
        windows: dict[tuple[int, int], tuple[float, float]] = {}
        for row in self._rows:
            by_rank.setdefault(row.rank, []).append(self._span(row))
            first, last = windows.get((row.rank, row.step), (row.start, row.stop))
            windows[row.rank, row.step] = min(first, row.start), max(last, row.stop)
        for (rank, step), (first, last) in windows.items():
            by_rank[rank].append(Span(rank, Lane.COMPUTE, Kind.STEP, str(step), first, last - first))
        return [span for spans in by_rank.values() for span in with_waits(spans)]

    def _span(self, row: _Row) -> Span:
        times = row.start, row.stop - row.start
        joined = self._communication(row)
        if joined is not None:
            name, purpose, group = joined
            return Span(
                *(row.rank, Lane.COMMUNICATION, Kind.COLLECTIVE, name, *times),
                group=group,
                purpose=purpose,
            )
        kind, name = _work(row)
        return Span(row.rank, Lane.COMPUTE, kind, name, *times)

    def _communication(self, row: _Row) -> tuple[str, str, tuple[int, ...]] | None:
        """Return name, purpose and group of a communication; None for other work."""
        kind = row.kind
        if kind.endswith(("-send", "-recv")):
            is_forward = kind.startswith("forward")
            ahead = is_forward == kind.endswith("-send")
            other = (row.stage + (1 if ahead else -1)) % self._stages
            pair = tuple(sorted({row.rank, self._beside(row.rank, (other, row.dp))}))
            return f"{'activation' if is_forward else 'gradient'}:{pair}", Purpose.PIPELINE, pair
        if "clip" in kind:
            return f"all_reduce:{kind}", Purpose.CONTROL, tuple(sorted(self._with_kind[kind]))
        for operation in (
            "all-reduce",
            "allreduce",
            "reduce-scatter",
            "reducescatter",
            "all-gather",
            "allgather",
        ):
            if operation in kind:
                return f"{operation}:{kind}", self._purpose(kind), self._group(row)
        return None

    @staticmethod
    def _purpose(kind: str) -> str:
        return Purpose.TENSOR if kind.startswith(("tp-", "layernorm")) else Purpose.DATA

    def _group(self, row: _Row) -> tuple[int, ...]:
        having = self._with_kind[row.kind]
        if row.kind.startswith(("tp-", "layernorm")):
            found = set(self._by_place[row.stage, row.dp])
        elif row.kind.startswith("embedding"):
            found = {rank for rank in having if self._places[rank][1] == row.dp}
        else:
            found = {rank for rank in having if self._places[rank][0] == row.stage}
            if len(found) > len({self._places[rank] for rank in found}):  # several along tp: their like only
                place = self._by_place[row.stage, row.dp].index(row.rank)
                found = {
                    ranks[place]
                    for (stage, _), ranks in self._by_place.items()
                    if stage == row.stage and place < len(ranks)
                }
        return tuple(sorted(found & having | {row.rank}))

    def _beside(self, rank: int, place: tuple[int, int]) -> int:
        """Return the rank at a place that is there what this rank is at its own place."""
        others = self._by_place.get(place, [rank])
        return others[min(self._by_place[self._places[rank]].index(rank), len(others) - 1)]


def _work(row: _Row) -> tuple[str, str]:
    """Return kind and name of work; in a pipeline the name is the action."""
    action = "" if row.microbatch is None else str(row.microbatch)
    if row.kind.startswith("forward"):
        return Kind.FORWARD, f"{row.chunk}F{action}" if action else ""
    if row.kind.startswith("backward"):
        letter = "W" if "wgrad" in row.kind else "B"
        return Kind.BACKWARD, f"{row.chunk}{letter}{action}" if action else ""
    if row.kind.startswith("optimizer"):
        return Kind.OPTIMIZER, ""
    if row.kind.startswith("data") or row.kind in ("loader", "dataloader"):
        return Kind.DATA_WAIT, ""
    return Kind.OTHER, row.kind
