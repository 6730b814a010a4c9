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

Messages between the stages of a pipeline: where they go, and which were noted but never sent.

Profilers may note messages of the first and the last stage that have no other end, and some at the ends of a
step. A message was not sent if

- it is received after the last forward (or backward) of the step has begun, or was sent before the first has
  ended: nothing there takes or gives it;
- its other end would be before the first stage or after the last. With several virtual stages a rank the
  last stage sends to the first one, and the k-th message tells its virtual stage by the k-th forward (or
  backward) beside it.

Operations of ranks as spans: which ranks a communication joins, and what the rest of the work is.

A message joins the stage before and the stage after; a collective of gradients or parameters joins the ranks
of a stage, one of the embeddings the ranks that have it in a pipeline, and clipping all ranks. The k-th of a
kind is the same one on all its ranks.

Messages that were noted but never sent join nobody; see `shoal.analyze.foreign.table`.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shoal.analyze.foreign.chrome import with_waits
from shoal.errors import MissingExtraError, RunError
from shoal.lines import bounded_lines
from shoal.spec.timeline import Kind, Lane, Purpose, Span, Timeline


@dataclass(frozen=True, slots=True)
class Operation:
    """What a rank did from one time to another, in seconds.

    Attributes:
        rank: The rank.
        step: The step.
        kind: Its kind, in small letters with hyphens.
        start: When it began.
        stop: When it ended.
        stage: The rank's stage.
        dp: The rank's place along dp.
        microbatch: The micro-batch, if the row names one.
        chunk: The virtual stage in the whole model.
    """

    rank: int
    step: int
    kind: str
    start: float
    stop: float
    stage: int
    dp: int
    microbatch: int | None
    chunk: int


_CLOCK = 5e-5  # seconds by which times of one rank may be wrong

Ends = list[tuple[str, bool]]
"""For each way that a message goes: forward or backward, and whether this rank sends. One or two ways."""


def ends_of(kind: str) -> Ends:
    """Return what a kind of operation sends and receives; nothing if it is no message.

    Args:
        kind: Such as "forward-send" or "backward-send-forward-recv".
    """
    words = kind.split("-")
    pairs = list(zip(words[::2], words[1::2], strict=False))
    is_message = len(words) in (2, 4) and all(
        passes in ("forward", "backward") and way in ("send", "recv") for passes, way in pairs
    )
    return [(passes, way == "send") for passes, way in pairs] if is_message else []


def ahead(passes: str, *, is_sent: bool) -> int:
    """Return 1 if the other end is the next stage, or -1 if it is the one before."""
    return 1 if (passes == "forward") == is_sent else -1


def unsent(rows: Sequence[Operation], stages: int) -> set[int]:
    """Return the positions of the messages that were not sent.

    Args:
        rows: The operations, by start.
        stages: Number of stages.
    """
    last = max(row.chunk for row in rows)
    works: dict[tuple[int, int, str], list[Operation]] = {}
    messages: dict[tuple[int, int, str, bool], list[int]] = {}
    for position, row in enumerate(rows):
        for passes, is_sent in ends_of(row.kind):
            messages.setdefault((row.rank, row.step, passes, is_sent), []).append(position)
        if row.kind.startswith(("forward", "backward")) and not ends_of(row.kind):
            works.setdefault((row.rank, row.step, row.kind.partition("-")[0]), []).append(row)
    sent: set[int] = set()
    for (rank, step, passes, is_sent), positions in messages.items():
        beside = works.get((rank, step, passes), [])
        if beside:
            begun, ended = beside[-1].start + _CLOCK, min(row.stop for row in beside) - _CLOCK
            positions = [
                position
                for position in positions
                if (rows[position].stop >= ended if is_sent else rows[position].start <= begun)
            ]
        # The first to be received may not be noted, since nobody sends it.
        first = not is_sent and len(positions) == len(beside) - 1
        for number, position in enumerate(positions, start=int(first)):
            place = rows[position].stage
            if last >= stages:  # virtual stages
                place = beside[number].chunk if number < len(beside) else rows[position].chunk
            if 0 <= place + ahead(passes, is_sent=is_sent) <= max(last, stages - 1):
                sent.add(position)
    return {position for positions in messages.values() for position in positions} - sent


class Joined:
    """The rows, and which ranks their communications join."""

    def __init__(self, rows: Sequence[Operation]) -> None:
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
        alone = unsent(self._rows, self._stages)
        for position, row in enumerate(self._rows):
            by_rank.setdefault(row.rank, []).append(self._span(row, is_joined=position not in alone))
            first, last = windows.get((row.rank, row.step), (row.start, row.stop))
            windows[row.rank, row.step] = min(first, row.start), max(last, row.stop)
        for (rank, step), (first, last) in windows.items():
            by_rank[rank].append(Span(rank, Lane.COMPUTE, Kind.STEP, str(step), first, last - first))
        return [span for spans in by_rank.values() for span in with_waits(spans)]

    def _span(self, row: Operation, *, is_joined: bool) -> Span:
        start, seconds = row.start, row.stop - row.start
        joined = self._communication(row, is_joined=is_joined)
        if joined is not None:
            name, purpose, group = joined
            lane, collective = Lane.COMMUNICATION, Kind.COLLECTIVE
            return Span(row.rank, lane, collective, name, start, seconds, group=group, purpose=purpose)
        kind, name = _work(row)
        return Span(row.rank, Lane.COMPUTE, kind, name, start, seconds)

    def _communication(self, row: Operation, *, is_joined: bool) -> tuple[str, str, tuple[int, ...]] | None:
        """Return name, purpose and group of a communication; None for other work."""
        kind = row.kind
        if ends := ends_of(kind):
            passes, is_sent = ends[0]
            what = {"forward": "activation", "backward": "gradient"}[passes] if len(ends) == 1 else "exchange"
            if not is_joined:
                return f"{what}:unsent", Purpose.PIPELINE, (row.rank,)
            other = (row.stage + ahead(passes, is_sent=is_sent)) % self._stages
            ways = row.rank, self._beside(row.rank, (other, row.dp))
            sender, receiver = ways if is_sent or len(ends) == 2 else ways[::-1]
            group = tuple(sorted({sender, receiver}))
            name = f"{sender} to {receiver}" if len(ends) == 1 else f"{group[0]} and {group[-1]}"
            return f"{what}:{name}", Purpose.PIPELINE, group
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

    def _group(self, row: Operation) -> tuple[int, ...]:
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


def _work(row: Operation) -> tuple[str, str]:
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
