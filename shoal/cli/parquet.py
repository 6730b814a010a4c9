"""The spans and the metrics of a run as Parquet files, for tools that analyse tables (extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from shoal.errors import MissingExtraError
from shoal.run import Run
from shoal.timeline import Span, Timeline
from shoal.timeline.windows import StepWindows

_ROWS = 50_000
"""Rows of a group, which is written at once."""


def write_parquet(run: Run, timeline: Timeline, folder: Path) -> None:
    """Write `spans.parquet` and `metrics.parquet` into a folder; make the folder.

    A span has its step, or null between steps; times are in seconds. Metrics have a row for each step.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError("writing Parquet files", package="pyarrow", extra="parquet") from error
    folder.mkdir(parents=True, exist_ok=True)
    word = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        {
            "rank": pa.int32(),
            "step": pa.int64(),
            "lane": word,
            "kind": word,
            "name": pa.string(),
            "start": pa.float64(),
            "duration": pa.float64(),
            "bytes": pa.int64(),
            "group": pa.list_(pa.int32()),
            "algorithm": word,
            "purpose": word,
        }
    )
    with parquet.ParquetWriter(folder / "spans.parquet", schema) as writer:
        spans = _spans(timeline)
        while rows := list(islice(spans, _ROWS)):
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    metrics = run.metrics()
    parquet.write_table(pa.table(_columns(metrics)), folder / "metrics.parquet")


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in timeline.ranks:
        windows = StepWindows(timeline, rank)
        for span in timeline.of(rank):
            yield _row(span, windows.started_in(span))


def _row(span: Span, step: int | None) -> dict[str, Any]:
    return {
        "rank": span.rank,
        "step": step,
        "lane": span.lane,
        "kind": span.kind,
        "name": span.name,
        "start": span.start,
        "duration": span.duration,
        "bytes": span.bytes,
        "group": list(span.group),
        "algorithm": span.algorithm,
        "purpose": span.purpose,
    }


def _columns(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | int | None]]:
    """Return the values by name; None for a step without one, and for a value that is no number."""
    names = dict.fromkeys(["step", *(name for values in metrics for name in values)])
    return {name: [_number(values.get(name), name == "step") for values in metrics] for name in names}


def _number(value: object, is_step: bool) -> float | int | None:
    if not isinstance(value, int | float):
        return None
    return int(value) if is_step else float(value)
