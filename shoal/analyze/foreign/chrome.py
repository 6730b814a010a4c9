"""Traces of PyTorch's profiler (Kineto) as a Timeline: one file a rank, as for Holistic Trace Analysis.

    step         "ProfilerStep#N": on the GPU if the trace has it there, else on the host
    compute      kernels that are no communication; without a GPU the outermost operators of each thread
    kind         optimizer if the host launched it within "Optimizer.step", backward if within
                 "autograd::engine", else forward
    collective   kernels of NCCL with their group and bytes, or annotations "gloo:..." of a CPU
    data wait    "enumerate(DataLoader)", where nothing computes
    copy         copies between host and device, on a lane of their own

Times are made comparable by the base time that the profiler writes, and are as exact as the hosts' clocks.
The files are read event by event; only what becomes a span stays in memory.

The events of a Chrome trace, one at a time, from files of any size.

A trace is a JSON list of events, or an object with the list as "traceEvents". The file is read in pieces, and
memory holds one event and one piece. Values beside the list are given if they come before it, and small ones
if they come after it.

Waits that other programs do not record: compute stands still until a collective has ended.

Between two spans that compute, a rank waits for each collective that ends there, from when the rank is free
and has started it until it ends. It also waits for a collective that lies within the optimizer's span, such
as that of the gradient's norm.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from shoal.errors import RunError
from shoal.spec.timeline import Kind, Lane, Purpose, Span, Timeline
from shoal.spec.timeline.intervals import Intervals, subtract, union

_PIECE = 1 << 20  # characters
_LONGEST_EVENT = 16 << 20  # characters
_LIST = '"traceEvents"'


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events; the first item is an object with the other values of the trace, without its list.

    Raises:
        RunError: The file cannot be read, is torn, or is no trace; the message names the place.
    """
    try:
        with _open(path) as file:
            yield from _Reader(path, file).events()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _refused(path, f"cannot be read: {error}") from error
    except RecursionError as error:
        raise _refused(path, "holds values that are nested too deeply") from error


def _open(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace")
    return path.open(encoding="utf-8-sig", errors="replace")


def _refused(path: Path, what: str) -> RunError:
    return RunError(
        f"{path} {what}",
        possible="a whole Chrome trace, as PyTorch's profiler exports it: .json or .json.gz",
        change="export or copy the trace again",
    )


class _Reader:
    """A place in a trace, and the text from there as far as it is read."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._at = 0
        self._before = 0  # characters of the file before the text
        self._decoder = json.JSONDecoder()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the values beside the list, then its events."""
        first = self._next_character()
        beside: dict[str, Any] = {}
        if first == "{":
            self._at += 1
            while (character := self._next_character()) == '"':
                key = self._value()
                self._expect(":")
                if key == "traceEvents":
                    break
                beside[str(key)] = self._value()
                if self._next_character() == ",":
                    self._at += 1
            else:
                raise self._torn(f"has no list of events before {character!r}")
            first = self._next_character()
        if first != "[":
            raise self._torn("is no list of events")
        self._at += 1
        yield beside
        while (character := self._next_character()) != "]":
            if character == ",":
                self._at += 1
                continue
            event = self._value()
            if not isinstance(event, dict):
                raise self._torn("has an event that is no object")
            yield event

    def _value(self) -> Any:
        """Return the next value; read on until it is whole."""
        self._next_character()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > _LONGEST_EVENT:
                    raise self._torn("has a value that is too long or cannot be read") from error
                if not self._read_on(max(_PIECE, len(self._text) - self._at)):
                    raise self._torn("ends within, or holds, a value that cannot be read") from error
                continue
            if end == len(self._text) and self._read_on(_PIECE):  # a number may go on
                continue
            self._at = end
            return value

    def _expect(self, character: str) -> None:
        if self._next_character() != character:
            raise self._torn(f"has no {character!r} where one is needed")
        self._at += 1

    def _next_character(self) -> str:
        """Return the next character that is no white space, without passing it.

        Raises:
            RunError: The file ends here.
        """
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on(_PIECE):
                raise self._torn("ends before its list of events does")

    def _read_on(self, characters: int) -> bool:
        """Read more text, and forget what was passed; return whether there was more."""
        more = self._file.read(characters)
        if not more:
            return False
        self._before += self._at
        self._text = self._text[self._at :] + more
        self._at = 0
        return True

    def _torn(self, what: str) -> RunError:
        return _refused(self._path, f"{what} (at character {self._before + self._at:,})")


def with_waits(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of one rank with waits on its compute lane."""
    collectives = sorted((span for span in spans if span.kind == Kind.COLLECTIVE), key=lambda span: span.stop)
    optimizers = sorted((each for each in spans if each.kind == Kind.OPTIMIZER), key=lambda each: each.start)
    starts = [span.start for span in optimizers]
    within = [each for each in collectives if _is_within(each, optimizers, starts)]
    working = subtract(
        union(
            (span.start, span.stop) for span in spans if span.lane == Lane.COMPUTE and span.kind != Kind.STEP
        ),
        union((each.start, each.stop) for each in within),
    )
    if not collectives or not working:
        return list(spans)
    whole = (
        min(working[0][0], min(span.start for span in collectives)),
        max(working[-1][1], collectives[-1].stop),
    )
    waits: list[Span] = []
    position = 0
    for start, stop in subtract([whole], working):
        while position < len(collectives) and collectives[position].stop <= start:
            position += 1
        free = start
        while position < len(collectives) and collectives[position].stop <= stop:
            each = collectives[position]
            begin = max(free, each.start)
            if each.stop > begin:
                seconds, purpose = each.stop - begin, each.purpose
                waits.append(
                    Span(each.rank, Lane.COMPUTE, Kind.WAIT, each.name, begin, seconds, purpose=purpose)
                )
                free = each.stop
            position += 1
    return [*spans, *waits]


def _is_within(collective: Span, optimizers: Sequence[Span], starts: Sequence[float]) -> bool:
    """Return whether a collective lies within one of these spans, which follow one another."""
    position = bisect_right(starts, collective.start) - 1
    return position >= 0 and collective.stop <= optimizers[position].stop


_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_RANK_IN_NAME = re.compile(r"rank[^0-9]{0,2}(\d+)", re.IGNORECASE)
_NUMBER_IN_NAME = re.compile(r"(\d+)")
_MOST_SPANS = 5_000_000
_OPERATIONS = (
    "allreduce",
    "allgather",
    "reducescatter",
    "broadcast",
    "alltoall",
    "sendrecv",
    "reduce",
    "send",
    "recv",
)
_BYTES = {
    "float": 4,
    "double": 8,
    "half": 2,
    "bfloat16": 2,
    "int": 4,
    "long": 8,
    "byte": 1,
    "char": 1,
    "int8": 1,
}
_JOINED = 2e-6  # seconds: kernels of one kind that are so close are one span

Interval = tuple[float, float]


@dataclass(slots=True)
class _Trace:
    """What one trace holds, with times in seconds from the base of the profiler.

    Attributes:
        rank: The rank, if the trace names it.
        base: Seconds to add to all times.
        steps: By "is on the GPU", the steps with start and stop.
        kernels: Start, stop and correlation of kernels that compute.
        collectives: Name, start, stop, bytes and group.
        launches: By correlation, the thread and the time of the launch.
        marks: By thread, the times within backward or the optimizer, with the kind.
        operators: By thread, the operators of the host.
        loads: When the host waits for data.
        copies: Copies between host and device.
    """

    rank: int | None = None
    base: float = 0.0
    steps: dict[bool, list[tuple[int, float, float]]] = field(default_factory=dict)
    kernels: list[tuple[float, float, int]] = field(default_factory=list)
    collectives: list[tuple[str, float, float, int, tuple[int, ...]]] = field(default_factory=list)
    launches: dict[int, tuple[Any, float]] = field(default_factory=dict)
    marks: dict[Any, list[tuple[float, float, str]]] = field(default_factory=dict)
    operators: dict[Any, list[Interval]] = field(default_factory=dict)
    loads: list[Interval] = field(default_factory=list)
    copies: list[Interval] = field(default_factory=list)


def read_traces(paths: Sequence[Path]) -> Timeline:
    """Read traces, one a rank.

    The rank is what the trace says of itself, else a number in the file's name, else the place in the order
    of names.

    Raises:
        RunError: A trace cannot be read, has no steps, or two have the same rank.
    """
    traces: dict[int, _Trace] = {}
    for position, path in enumerate(paths):
        trace = _read(path)
        rank = trace.rank
        if rank is None:
            found = _RANK_IN_NAME.search(path.name) or (len(paths) > 1 and _NUMBER_IN_NAME.search(path.name))
            rank = int(found[1]) if found else position
        if rank in traces:
            raise RunError(
                f"{path} is a second trace of rank {rank}",
                possible="one trace for each rank",
                change="remove one of them, or name the files by rank, such as rank-3.json",
            )
        traces[rank] = trace
    first = min(trace.base for trace in traces.values())
    ranks = tuple(sorted(traces))
    spans: list[Span] = []
    for rank, trace in traces.items():
        spans += with_waits(_spans(rank, trace, trace.base - first, ranks))
    begin = min((span.start for span in spans), default=0.0)
    earlier = (replace(span, start=span.start - begin) for span in spans)
    return Timeline(earlier, clock_error=0.0 if len(traces) == 1 else None)


def _read(path: Path) -> _Trace:
    trace = _Trace()
    events = events_of(path)
    _take_beside(trace, next(events))
    for number, event in enumerate(events, start=1):
        if event.get("ph") != "X":
            continue
        try:
            start = float(event["ts"]) / 1e6
            stop = start + max(float(event.get("dur", 0.0)), 0.0) / 1e6
            if not math.isfinite(stop):
                raise ValueError(f"times from {start} to {stop}")
            name, category = str(event.get("name", "")), str(event.get("cat", "")).lower()
            args = event.get("args")
            _take(
                trace, name, category, start, stop, event.get("tid"), args if isinstance(args, dict) else {}
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(
                f"event {number} of {path} is no event of a trace: {error!r}",
                possible="complete events with numbers as ts and dur",
                change="export the trace again",
            ) from error
        if number % 100_000 == 0 and len(trace.kernels) + len(trace.launches) > _MOST_SPANS:
            raise RunError(
                f"{path} has more than {_MOST_SPANS:,} kernels and launches",
                possible="traces up to this size",
                change="profile fewer steps",
            )
    if not any(trace.steps.values()):
        raise RunError(
            f"{path} has no steps",
            possible='a trace with events "ProfilerStep#N"',
            change="call profiler.step() after each training step",
        )
    return trace


def _take_beside(trace: _Trace, beside: Mapping[str, Any]) -> None:
    about = beside.get("distributedInfo")
    if isinstance(about, dict) and isinstance(about.get("rank"), int):
        trace.rank = about["rank"]
    base = beside.get("baseTimeNanoseconds")
    if isinstance(base, int | float):
        trace.base = base / 1e9


def _take(
    trace: _Trace, name: str, category: str, start: float, stop: float, thread: Any, args: Mapping[str, Any]
) -> None:
    step = _STEP.search(name)
    if step is not None and "annotation" in category:
        trace.steps.setdefault(category.startswith("gpu"), []).append((int(step[1]), start, stop))
    elif category == "kernel":
        if "nccl" in name.lower():
            trace.collectives.append((*_collective(name, args, start, stop),))
        else:
            trace.kernels.append((start, stop, int(args.get("correlation", -1))))
    elif category in ("gpu_memcpy", "gpu_memset"):
        trace.copies.append((start, stop))
    elif category in ("cuda_runtime", "cuda_driver", "hip_runtime"):
        if "correlation" in args:
            trace.launches[int(args["correlation"])] = thread, start
    elif "DataLoader" in name:
        trace.loads.append((start, stop))
    elif name.startswith("Optimizer.step"):
        trace.marks.setdefault(thread, []).append((start, stop, Kind.OPTIMIZER))
    elif name.startswith("autograd::engine::evaluate_function"):
        trace.marks.setdefault(thread, []).append((start, stop, Kind.BACKWARD))
    elif name.startswith("gloo:"):
        trace.collectives.append((*_collective(name, args, start, stop),))
    elif category == "cpu_op" and not name.startswith(("c10d::", "record_param_comms")):
        trace.operators.setdefault(thread, []).append((start, stop))


def _collective(
    name: str, args: Mapping[str, Any], start: float, stop: float
) -> tuple[str, float, float, int, tuple[int, ...]]:
    """Return name, times, bytes and group of a collective; an empty group if the trace does not tell it."""
    told = str(args.get("Collective name", "")) or name
    plain = told.lower().replace("_", "").replace(" ", "")
    operation = next((each for each in _OPERATIONS if each in plain), "collective")
    elements = max(int(args.get("In msg nelems") or 0), int(args.get("Out msg nelems") or 0))
    nbytes = elements * _BYTES.get(str(args.get("dtype", "")).lower(), 4)
    group: tuple[int, ...] = ()
    ranks = args.get("Process Group Ranks")
    if ranks is not None:
        try:
            group = tuple(
                sorted({int(each) for each in (json.loads(ranks) if isinstance(ranks, str) else ranks)})
            )
        except (TypeError, ValueError):
            group = ()
    return f"{operation}:{args.get('Process Group Name', '')}".rstrip(":"), start, stop, nbytes, group


def _spans(rank: int, trace: _Trace, shift: float, everyone: tuple[int, ...]) -> list[Span]:
    computed = _computed(trace)
    busy = union(each for found in computed.values() for each in found)
    spans: list[Span] = []

    def add(lane: str, kind: str, moments: Intervals) -> None:
        spans.extend(Span(rank, lane, kind, "", start + shift, stop - start) for start, stop in moments)

    for kind, moments in computed.items():
        add(Lane.COMPUTE, kind, moments)
    communicating = union((start, stop) for _, start, stop, _, _ in trace.collectives)
    idle = subtract(union(trace.loads), union([*busy, *communicating]))
    add(Lane.COMPUTE, Kind.DATA_WAIT, idle)
    add(Lane.COPY, Kind.COPY, union(trace.copies))
    for name, start, stop, nbytes, group in trace.collectives:
        spans.append(
            Span(
                rank,
                Lane.COMMUNICATION,
                Kind.COLLECTIVE,
                name,
                start + shift,
                stop - start,
                nbytes,
                group or everyone,
                purpose=Purpose.DATA,
            )
        )
    steps = trace.steps.get(True) or trace.steps[False]
    whole = [(start, stop) for _, start, stop in steps]
    for index, start, stop in steps:
        spans.append(Span(rank, Lane.COMPUTE, Kind.STEP, str(index), start + shift, stop - start))
    first, last = min(whole)[0] + shift, max(stop for _, stop in whole) + shift
    return [span for span in spans if span.stop > first and span.start < last]


def _computed(trace: _Trace) -> dict[str, Intervals]:
    """Return when a rank computes, by kind; kernels beside one another count once."""
    marks = {thread: sorted(found) for thread, found in trace.marks.items()}
    found: dict[str, list[Interval]] = {Kind.OPTIMIZER: [], Kind.BACKWARD: [], Kind.FORWARD: []}
    if trace.kernels or trace.launches:
        for start, stop, correlation in trace.kernels:
            thread, launched = trace.launches.get(correlation, (None, start))
            found[_kind_at(marks.get(thread, ()), launched)].append((start, stop))
    else:
        for thread, operators in trace.operators.items():
            for start, stop in union(operators):
                found[_kind_at(marks.get(thread, ()), start)].append((start, stop))
    computed: dict[str, Intervals] = {}
    taken: Intervals = []
    for kind, moments in found.items():
        whole = union((start, stop + _JOINED) for start, stop in moments)
        joined = union((start, stop - _JOINED) for start, stop in whole)
        computed[kind] = subtract(joined, taken)
        taken = union([*taken, *joined])
    return computed


def _kind_at(marks: Sequence[tuple[float, float, str]], moment: float) -> str:
    """Return the kind of work that a thread does at a moment; marks of a thread do not overlap, or nest."""
    position = bisect_right(marks, (moment, float("inf"), "")) - 1
    for start, stop, kind in reversed(marks[max(position - 3, 0) : position + 1]):
        if start <= moment < stop:
            return kind
    return Kind.FORWARD
