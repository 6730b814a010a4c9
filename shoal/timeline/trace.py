"""A Timeline in Chrome's trace format, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

A rank is a process and a lane is a thread; the lane of the host has the times at which it gave the device
the work of its spans. Spans of one thread must nest, so a span that overlaps others
of its lane without nesting, such as the second of two collectives in flight, goes to a further thread.
Format: "Trace Event Format", complete events (ph "X") and metadata (ph "M").
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.timeline.span import Kind, Lane, Span
from shoal.timeline.timeline import Timeline

_ROUNDING = 1e-9
"""Seconds by which bounds that are the same may differ: files round times to the nanosecond."""

_STEPS = {Kind.STEP.value: "step ", Kind.HELD_STEP.value: "held step "}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the whole trace as an object; times are in microseconds."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(timeline))}


def write_chrome_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the trace to a file event by event, so that it takes no memory; make the parents."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for event in _events(timeline):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in timeline.ranks:
        yield _metadata("process_name", rank, 0, name=f"rank {rank}")
        yield _metadata("process_sort_index", rank, 0, sort_index=rank)
        of_host = [twin for span in timeline.of(rank) if (twin := span.on_host()) is not None]
        spans = [*timeline.of(rank), *of_host]
        for lane_index, lane in enumerate(Lane):
            rows = 0
            for span, row in _rows([span for span in spans if span.lane == lane]):
                thread = lane_index + row * len(Lane)
                if row == rows:
                    rows += 1
                    name = lane.value if row == 0 else f"{lane.value} {row + 1}"
                    yield _metadata("thread_name", rank, thread, name=name)
                    yield _metadata("thread_sort_index", rank, thread, sort_index=thread)
                yield _complete(span, thread)


def _rows(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yield spans by start, each with the first row in which it nests: within those that it overlaps."""
    open_stops: list[list[float]] = []  # by row: the ends of the open spans, innermost last
    for span in sorted(spans, key=lambda span: (span.start, -span.duration)):
        row = 0
        while row < len(open_stops) and not _nests(span, open_stops[row]):
            row += 1
        if row == len(open_stops):
            open_stops.append([])
        open_stops[row].append(span.stop)
        yield span, row


def _nests(span: Span, stops: list[float]) -> bool:
    """Return whether the span lies within the innermost open span; forget spans that have ended."""
    while stops and stops[-1] <= span.start + _ROUNDING:
        stops.pop()
    return not stops or span.stop <= stops[-1] + _ROUNDING


def _complete(span: Span, thread: int) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if span.bytes:
        args["bytes"] = span.bytes
    if span.algorithm:
        args["algorithm"] = span.algorithm
    if span.group:
        args["group"] = list(span.group)
    return {
        "ph": "X",
        "pid": span.rank,
        "tid": thread,
        "cat": span.kind,
        "name": _STEPS.get(span.kind, "") + (span.name or span.kind),
        "ts": round(span.start * 1e6, 3),
        "dur": round(span.duration * 1e6, 3),
        "args": args,
    }


def _metadata(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": args}
