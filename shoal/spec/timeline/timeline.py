"""The Timeline: spans of all ranks on one clock, and the files that hold them, one a rank.

One clock for the timeline files of all hosts.

The starts of spans count from an origin, and the header of a file has that origin on two clocks: the wall
clock, and the monotonic clock of its host. Ranks of one host share the monotonic clock, so their times agree
exactly, whatever happened to the wall clock between their starts.

Between hosts the offset of the monotonic clocks is measured while the run goes on. One rank of each other
host appends a line to `clock-*.jsonl` every few seconds:

    {"host":"52e1","reference":"90c4","monotonic_ns":7000,"reference_monotonic_ns":9000,"error_ns":40}

At one moment the host's clock showed the first number and the reference's the second, to within the error.
Clocks drift apart by some microseconds a second. The offset at a time is that of a straight line through the
measurements around it, each weighted by its error. Without measurements, hosts are as exact as their wall
clocks.

A Timeline in Chrome's trace format, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

A rank is a process and a lane is a thread; the lane of the host has the times at which it gave the device
the work of its spans. Spans of one thread must nest, so a span that overlaps others
of its lane without nesting, such as the second of two collectives in flight, goes to a further thread.
Format: "Trace Event Format", complete events (ph "X") and metadata (ph "M").
"""

from __future__ import annotations

import itertools
import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from shoal.errors import ShoalError
from shoal.limits import json_of
from shoal.lines import bounded_lines
from shoal.spec.timeline.span import FORMAT, Kind, Lane, Span, header_line, parse_span, span_line

_AROUND_NS = 30_000_000_000
"""Measurements so far from a time count for its offset."""
_FEWEST = 4
"""As many of the nearest count at least."""
_LARGEST_ERROR = 3.0
"""A measurement does not count if its error is so many times the smallest around it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a part of a timeline file.

    Attributes:
        host: The host; "" if the file does not name it.
        unix_ns: The origin on the wall clock.
        monotonic_ns: The origin on the monotonic clock of the host.
    """

    host: str
    unix_ns: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True)
class Tie:
    """A measurement: at one moment two hosts' clocks showed these times."""

    host: str
    reference: str
    monotonic_ns: int
    reference_monotonic_ns: int
    error_ns: int

    @property
    def offset_ns(self) -> int:
        """Return what to add to a time of the host to have that of the reference."""
        return self.reference_monotonic_ns - self.monotonic_ns


@dataclass(frozen=True, slots=True)
class ClockFit:
    """The offset of a host's clock over time.

    Attributes:
        base_ns: The offset in the first measurement.
        times: The times of the measurements on the host's clock, in nanoseconds.
        offsets: The offset at each, less `base_ns`, from the line through those around.
        error: Seconds by which offsets may be wrong.
    """

    base_ns: int
    times: Sequence[int]
    offsets: Sequence[float]
    error: float

    def offset(self, monotonic_ns: int) -> float:
        """Return the offset in seconds, less the base, between measurements by interpolation."""
        after = bisect_left(self.times, monotonic_ns)
        if len(self.times) == 1:
            return self.offsets[0]
        low = min(max(after - 1, 0), len(self.times) - 2)
        first, last = self.times[low], self.times[low + 1]
        share = (monotonic_ns - first) / (last - first)
        return self.offsets[low] + share * (self.offsets[low + 1] - self.offsets[low])


def tie_line(tie: Tie) -> str:
    """Return the line of a measurement, with its newline."""
    fields = {
        "host": tie.host,
        "reference": tie.reference,
        "monotonic_ns": tie.monotonic_ns,
        "reference_monotonic_ns": tie.reference_monotonic_ns,
        "error_ns": tie.error_ns,
    }
    return json.dumps(fields, separators=(",", ":")) + "\n"


def read_ties(directory: str | os.PathLike[str]) -> list[Tie]:
    """Read the measurements of a directory; lines that cannot be read are skipped."""
    ties = []
    for path in sorted(Path(directory).glob("clock-*.jsonl")):
        for line in bounded_lines(path):
            try:
                fields = json_of(line)
                times = (fields["monotonic_ns"], fields["reference_monotonic_ns"], fields["error_ns"])
                ties.append(Tie(str(fields["host"]), str(fields["reference"]), *map(int, times)))
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
    return ties


def fit(ties: Iterable[Tie]) -> ClockFit | None:
    """Return the offset of a host's clock over time; None without measurements.

    Args:
        ties: Measurements of one host with one reference.
    """
    ordered = sorted({tie.monotonic_ns: tie for tie in ties}.values(), key=lambda tie: tie.monotonic_ns)
    if not ordered:
        return None
    base = ordered[0].offset_ns
    times = [tie.monotonic_ns for tie in ordered]
    offsets = [
        _line_at(tie.monotonic_ns, _around(ordered, times, at), base) for at, tie in enumerate(ordered)
    ]
    return ClockFit(base, times, offsets, median(tie.error_ns for tie in ordered) / 1e9)


def _around(ordered: Sequence[Tie], times: Sequence[int], at: int) -> Sequence[Tie]:
    """Return the measurements around one of them that are good enough to count."""
    low = min(bisect_left(times, times[at] - _AROUND_NS), max(at - _FEWEST // 2, 0))
    high = max(bisect_left(times, times[at] + _AROUND_NS + 1), min(at + _FEWEST // 2, len(times)))
    near = ordered[low:high]
    smallest = min(tie.error_ns for tie in near)
    return [tie for tie in near if tie.error_ns <= _LARGEST_ERROR * max(smallest, 1)]


def _line_at(monotonic_ns: int, ties: Sequence[Tie], base_ns: int) -> float:
    """Return the offset in seconds, less the base, of the weighted line through measurements."""
    weights = [1.0 / max(tie.error_ns, 1) ** 2 for tie in ties]
    times = [(tie.monotonic_ns - monotonic_ns) / 1e9 for tie in ties]
    offsets = [(tie.offset_ns - base_ns) / 1e9 for tie in ties]
    whole = sum(weights)
    time = sum(w * t for w, t in zip(weights, times, strict=True)) / whole
    offset = sum(w * o for w, o in zip(weights, offsets, strict=True)) / whole
    spread = sum(w * (t - time) ** 2 for w, t in zip(weights, times, strict=True))
    if spread <= 0 or len(ties) < _FEWEST:
        return offset
    slope = (
        sum(w * (t - time) * (o - offset) for w, t, o in zip(weights, times, offsets, strict=True)) / spread
    )
    return offset - slope * time


@dataclass(frozen=True, slots=True)
class OneClock:
    """The times of all hosts on one clock.

    Attributes:
        first: By host, the origin that its monotonic clock is tied to the wall clock by.
        fits: By host, the reference and the offset of its clock, where it was measured.
    """

    first: Mapping[str, Origin]
    fits: Mapping[str, tuple[str, ClockFit]]

    @classmethod
    def of(cls, origins: Iterable[Origin], ties: Sequence[Tie]) -> OneClock:
        """Return the clock of these origins, the first rank's first."""
        first: dict[str, Origin] = {}
        for origin in origins:
            if origin.host:
                first.setdefault(origin.host, origin)
        fits: dict[str, tuple[str, ClockFit]] = {}
        for host in first:
            mine = [tie for tie in ties if tie.host == host and tie.reference in first]
            references = {tie.reference for tie in mine}
            for reference in sorted(references)[-1:]:
                found = fit(tie for tie in mine if tie.reference == reference)
                if found is not None:
                    fits[host] = reference, found
        return cls(first, fits)

    def unix_ns(self, origin: Origin) -> int:
        """Return the origin on the one clock, as its wall-clock time."""
        if not origin.host:
            return origin.unix_ns
        reference, found = self.fits.get(origin.host, (origin.host, None))
        first = self.first[reference]
        base = found.base_ns if found is not None else 0
        return first.unix_ns + origin.monotonic_ns + base - first.monotonic_ns

    def correction(self, origin: Origin, seconds: float) -> float:
        """Return what to add to a time, in seconds, so many seconds after the origin."""
        if origin.host not in self.fits:
            return 0.0
        return self.fits[origin.host][1].offset(origin.monotonic_ns + round(seconds * 1e9))

    @property
    def error(self) -> float | None:
        """Return by how many seconds times of hosts may differ; None if an offset was not measured."""
        hosts = set(self.first)
        references = {reference for reference, _ in self.fits.values()}
        if len(hosts) <= 1:
            return 0.0
        if len(references) != 1 or hosts - set(self.fits) != references:
            return None
        return max(found.error for _, found in self.fits.values())


class Timeline:
    """Spans, sorted by start.

    Args:
        spans: The spans, in any order.
        origin_unix_ns: The wall-clock time of second 0, in nanoseconds; 0 for a prediction.
        clock_error: Seconds by which times of different ranks may be shifted against each other; None if it
            is not known, since hosts have clocks of their own that were not compared.
        hosts: By rank, what its host is called; "" or no entry if it is not known.
    """

    def __init__(
        self,
        spans: Iterable[Span],
        *,
        origin_unix_ns: int = 0,
        clock_error: float | None = 0.0,
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        self.spans: tuple[Span, ...] = tuple(sorted(spans, key=lambda span: span.start))
        self.origin_unix_ns = origin_unix_ns
        self.clock_error = clock_error
        self.hosts = {rank: host for rank, host in (hosts or {}).items() if host}

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have spans, ascending."""
        return tuple(sorted(self._by_rank))

    def of(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of one rank, sorted by start."""
        return self._by_rank.get(rank, ())

    def steps(self) -> tuple[int, ...]:
        """Return the indices of the steps that any rank finished, ascending."""
        return self._indices

    def step(self, rank: int, index: int) -> Span | None:
        """Return the span of a rank's step: the last one, if a resumed run repeated that step."""
        return self._steps.get(rank, {}).get(index)

    def window(self, start: float, stop: float) -> Timeline:
        """Return the spans that lie in [start, stop) wholly or in part, uncut."""
        inside = (span for span in self.spans if span.start < stop and span.stop > start)
        return self.with_spans(inside)

    def with_spans(self, spans: Iterable[Span]) -> Timeline:
        """Return a Timeline of other spans, on the same clock and hosts."""
        return Timeline(
            spans, origin_unix_ns=self.origin_unix_ns, clock_error=self.clock_error, hosts=self.hosts
        )

    def since_step(self, index: int) -> Timeline:
        """Return the spans since the first rank last began this step; none if it did not finish it."""
        first = self.step(self.ranks[0], index) if self.ranks else None
        return self.window(math.inf if first is None else first.start, math.inf)

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> Timeline:
        """Read the timeline files of a directory; a directory without any gives an empty Timeline.

        Second 0 is the earliest origin in the files. Times of hosts whose clocks were compared are on one
        clock; see `shoal.spec.timeline.timeline`. A torn line is skipped where a killed process leaves
        one: at the end of a file, or before the header of the process that went on.

        Raises:
            ShoalError: A file is malformed elsewhere; the message names file and line.
        """
        parts = [part for path in sorted(Path(directory).glob("rank-*.jsonl")) for part in _parts(path)]
        clock = OneClock.of((part.origin for part in parts), read_ties(directory))
        origin = min((clock.unix_ns(part.origin) for part in parts), default=0)
        spans = itertools.chain.from_iterable(part.spans(clock, origin) for part in parts)
        hosts = {part.rank: part.origin.host for part in parts}
        return cls(spans, origin_unix_ns=origin, clock_error=clock.error, hosts=hosts)

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write one file a rank into the directory, over files with these names; make the directory."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.ranks:
            with (folder / f"rank-{rank:05d}.jsonl").open("w", encoding="utf-8") as file:
                file.write(header_line(rank, self.origin_unix_ns))
                for s in self.of(rank):
                    file.write(
                        span_line(
                            s.kind,
                            s.lane,
                            s.name,
                            s.start,
                            s.duration,
                            s.bytes,
                            s.group,
                            s.algorithm,
                            s.purpose,
                            s.host,
                        )
                    )

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Span, ...]]:
        by_rank: dict[int, list[Span]] = {}
        for span in self.spans:
            by_rank.setdefault(span.rank, []).append(span)
        return {rank: tuple(spans) for rank, spans in by_rank.items()}

    @cached_property
    def _indices(self) -> tuple[int, ...]:
        return tuple(sorted({index for steps in self._steps.values() for index in steps}))

    @cached_property
    def _steps(self) -> dict[int, dict[int, Span]]:
        steps: dict[int, dict[int, Span]] = {}
        for span in self.spans:
            if span.kind == Kind.STEP:
                steps.setdefault(span.rank, {})[int(span.name)] = span
        return steps


@dataclass
class _Part:
    """The part of a file that one process wrote: a header and the numbered lines below it."""

    path: Path
    rank: int
    origin: Origin
    lines: list[tuple[int, dict[str, Any]]]

    def spans(self, clock: OneClock, origin_unix_ns: int) -> Iterator[Span]:
        """Yield the spans on the one clock, with starts counted from another origin."""
        offset = (clock.unix_ns(self.origin) - origin_unix_ns) / 1e9
        is_corrected = self.origin.host in clock.fits
        for number, fields in self.lines:
            try:
                more = clock.correction(self.origin, float(fields["start"])) if is_corrected else 0.0
                yield parse_span(fields, rank=self.rank, offset=offset + more)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ShoalError(f"{self.path}:{number}: not a span of a timeline: {error!r}") from error


def _parts(path: Path) -> list[_Part]:
    parts: list[_Part] = []
    torn: int | None = None
    for number, line in enumerate(bounded_lines(path), start=1):
        try:
            fields = json_of(line)
        except ValueError:
            _refuse(path, torn)
            torn = number
            continue
        if isinstance(fields, dict) and "timeline" in fields:
            parts.append(_part(path, number, fields))
            torn = None
        elif parts:
            _refuse(path, torn)
            parts[-1].lines.append((number, fields))
        else:
            raise ShoalError(f'{path}:{number}: a timeline file begins with a "timeline" header')
    return parts


def _part(path: Path, number: int, header: dict[str, Any]) -> _Part:
    if header["timeline"] != FORMAT:
        raise ShoalError(
            f"{path}:{number}: this timeline has format {header['timeline']!r}, and only {FORMAT} is known"
        )
    try:
        host, monotonic = str(header.get("host", "")), int(header.get("origin_monotonic_ns", 0))
        return _Part(path, int(header["rank"]), Origin(host, int(header["origin_unix_ns"]), monotonic), [])
    except (KeyError, TypeError, ValueError) as error:
        raise ShoalError(f"{path}:{number}: the header of this timeline is not whole: {error!r}") from error


def _refuse(path: Path, torn: int | None) -> None:
    """Raise for a line that cannot be read and that no killed process explains."""
    if torn is not None:
        raise ShoalError(f"{path}:{torn}: this line of a timeline cannot be read")


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
