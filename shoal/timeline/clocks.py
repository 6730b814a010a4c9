"""One clock for the timeline files of all hosts.

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
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shoal.limits import json_of
from shoal.lines import bounded_lines

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
