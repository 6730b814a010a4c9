"""Some steps of a run's timeline, found and read without the rest of the files.

A timeline file may have gigabytes. Its headers are found once, and later only in what was appended. A step is
found by halving: within the part that one process wrote, the indices of step spans ascend. Then only the
lines from the end of the step before the first one to the end of the last one are read.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shoal.errors import ShoalError
from shoal.limits import open_regular
from shoal.spec.timeline import Span, Timeline
from shoal.spec.timeline.span import FORMAT, parse_span
from shoal.spec.timeline.timeline import OneClock, Origin, Tie, read_ties

_HEADER = b'{"timeline":'
_STEP = re.compile(rb'\n\{"kind":"step","name":"(\d{1,15})"[^\n]*\n')
_LONGEST_HEADER = 4096
_MOST_BYTES = 24 << 20
"""Most bytes that are read of all files for one answer."""
_FEWEST_STEPS = 3
_MOST_HEADERS = 10_000


@dataclass(frozen=True, slots=True)
class Restart:
    """The part of a file that one process wrote.

    Attributes:
        rank: The rank.
        begin: Byte of the header.
        origin: Its second 0.
    """

    rank: int
    begin: int
    origin: Origin


Malformed = dict[tuple[Path, int], ShoalError]
"""The error of each malformed line, by its file and byte."""


@final
class TimelineFiles:
    """The timeline files of a run.

    Args:
        folder: The folder of the files; it may be absent or empty.

    Attributes:
        unreadable: The errors of files that are no timeline; these are left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self.unreadable: list[ShoalError] = []
        self._ties: list[Tie] = []
        self._tied: list[tuple[str, int]] = []

    def refresh(self) -> bool:
        """Look for new files and for what was appended; return whether there was anything."""
        changed, self.unreadable = False, []
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            file = self._files.setdefault(path, _File(path))
            try:
                changed |= file.refresh()
            except ShoalError as error:
                del self._files[path]
                self.unreadable.append(error)
        return changed

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a file, ascending."""
        return sorted(file.parts[-1].rank for file in self._files.values() if file.parts)

    def restarts(self) -> dict[int, list[Restart]]:
        """Return, by rank, the times at which a process of that rank began."""
        return {file.parts[0].rank: file.parts for file in self._files.values() if file.parts}

    def last_step(self) -> int | None:
        """Return the newest step that every rank finished; None if there is none."""
        found = [file.last_step() for file in self._files.values() if file.parts]
        return min(step for step in found if step is not None) if found and None not in found else None

    def first_step(self) -> int | None:
        """Return the oldest step that any rank finished in its newest part; None if there is none."""
        found = [file.first_step() for file in self._files.values() if file.parts]
        steps = [step for step in found if step is not None]
        return min(steps) if steps else None

    def steps(self, first: int, last: int, malformed: Malformed | None = None) -> Timeline:
        """Return the spans from the start of one step to the end of another, of all ranks.

        Args:
            first: The first step.
            last: The last step.
            malformed: Gets the errors of malformed lines, which are left out; without it the first is raised.

        Raises:
            ShoalError: A line is malformed, or the steps have more bytes than a page can show.
        """
        clock, origin = self._clock()
        ranges = [(file, found) for file in self._files.values() if (found := file.range_of(first, last))]
        size = sum(stop - start for _, (start, stop, _) in ranges)
        if size > _MOST_BYTES:
            raise ShoalError(
                f"steps {first} to {last} have {size >> 20} MiB of spans, more than the "
                f"{_MOST_BYTES >> 20} MiB that a page reads at once: choose fewer steps"
            )
        spans = [span for file, found in ranges for span in file.read(*found, clock, origin, malformed)]
        hosts = {rank: parts[-1].origin.host for rank, parts in self.restarts().items()}
        timeline = Timeline(spans, origin_unix_ns=origin, clock_error=clock.error, hosts=hosts)
        marks = [
            mark
            for rank in timeline.ranks
            for index in timeline.steps()
            if first <= index <= last and (mark := timeline.step(rank, index)) is not None
        ]
        if not marks:
            return Timeline([])
        return timeline.window(min(mark.start for mark in marks), max(mark.stop for mark in marks))

    def _clock(self) -> tuple[OneClock, int]:
        """Return the one clock of all hosts, and the wall-clock time of second 0 on it."""
        ties = [(path.name, path.stat().st_size) for path in sorted(self._folder.glob("clock-*.jsonl"))]
        if ties != self._tied:
            self._ties, self._tied = read_ties(self._folder), ties
        origins = [part.origin for file in self._files.values() for part in file.parts]
        clock = OneClock.of(origins, self._ties)
        return clock, min(map(clock.unix_ns, origins), default=0)

    def newest(self, steps: int, spans: int, malformed: Malformed) -> Timeline:
        """Return the newest steps, fewer if they would have more than so many spans; three at least.

        Ranks that are so many steps behind the first one are left out: they were lost, and others went on.

        Raises:
            ShoalError: The steps have more bytes than a page can show.
        """
        found = [file.last_step() for file in self._files.values() if file.parts]
        finished = [step for step in found if step is not None]
        if not finished or len(finished) < len(found):
            return Timeline([])
        last = min(step for step in finished if step > max(finished) - steps)
        ranges = [file.range_of(last, last) for file in self._files.values()]
        size = sum(each[1] - each[0] for each in ranges if each)
        sample = self.steps(last, last, malformed)
        fitting = min(spans // max(1, len(sample)), _MOST_BYTES // (2 * max(1, size)))
        return self.steps(max(last - min(steps, max(_FEWEST_STEPS, fitting)) + 1, 0), last, malformed)


@final
class _File:
    """One file. Offsets count bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.parts: list[Restart] = []
        self._scanned = 0
        self._identity: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Find the headers in what was appended; return whether there was a whole line.

        Raises:
            ShoalError: It is not a timeline.
        """
        found = self.path.stat()
        identity = (found.st_dev, found.st_ino)
        if identity != self._identity or found.st_size < self._scanned:
            self._forget()
            self._identity = identity
        if found.st_size == self._scanned:
            return False
        with self._mapped() as data:
            begin, end = self._scanned, data.rfind(b"\n") + 1
            at = _next_header(data, self._scanned) if self.parts else 0
            while 0 <= at < end and len(self.parts) < _MOST_HEADERS:
                self.parts.append(self._header(data, at))
                at = _next_header(data, at + 1)
            self._scanned = end
        return end > begin

    def _mapped(self) -> mmap.mmap:
        with open_regular(self.path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _header(self, data: mmap.mmap, at: int) -> Restart:
        stop = data.find(b"\n", at, at + _LONGEST_HEADER)
        try:
            fields = json.loads(data[at : stop if stop >= 0 else at + _LONGEST_HEADER])
            if fields["timeline"] != FORMAT:
                raise ShoalError(f"{self.path}: a timeline of format {fields['timeline']!r} is not known")
            host, monotonic = str(fields.get("host", "")), int(fields.get("origin_monotonic_ns", 0))
            return Restart(int(fields["rank"]), at, Origin(host, int(fields["origin_unix_ns"]), monotonic))
        except (AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ShoalError(f"{self.path}: the header at byte {at} is not whole: {error!r}") from error

    def last_step(self) -> int | None:
        """Return the newest finished step of the newest part that has one."""
        with self._mapped() as data:
            for begin, end in reversed(self._bounds(len(data))):
                at = end
                while (at := data.rfind(b'\n{"kind":"step"', begin, at)) >= 0:
                    if match := _STEP.match(data, at, end):
                        return int(match[1])
        return None

    def first_step(self) -> int | None:
        """Return the oldest finished step of the newest part."""
        with self._mapped() as data:
            begin, end = self._bounds(len(data))[-1]
            match = _STEP.search(data, begin, end)
            return int(match[1]) if match else None

    def range_of(self, first: int, last: int) -> tuple[int, int, Restart] | None:
        """Return the bytes of some steps and the part they are in; None if the file has none of them."""
        with self._mapped() as data:
            for number, (begin, end) in reversed(list(enumerate(self._bounds(len(data))))):
                oldest = _STEP.search(data, begin, end)
                if oldest is None or int(oldest[1]) > last:
                    continue
                start, stop = _after(data, first - 1, begin, end), _after(data, last, begin, end)
                if start < stop:
                    return start, stop, self.parts[number]
        return None

    def read(
        self,
        start: int,
        stop: int,
        part: Restart,
        clock: OneClock,
        origin: int,
        malformed: Malformed | None,
    ) -> Iterator[Span]:
        """Yield the spans of some bytes, with starts counted from an origin on the one clock.

        Raises:
            ShoalError: A line is malformed, and errors are not collected.
        """
        with self._mapped() as data:
            lines = data[start:stop].split(b"\n")
        offset = (clock.unix_ns(part.origin) - origin) / 1e9
        is_corrected = part.origin.host in clock.fits
        at = start
        for line in lines:
            if line:
                try:
                    fields: dict[str, Any] = json.loads(line)
                    if "timeline" not in fields:
                        more = clock.correction(part.origin, float(fields["start"])) if is_corrected else 0.0
                        yield parse_span(fields, rank=part.rank, offset=offset + more)
                except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                    told = ShoalError(f"{self.path}: byte {at}: not a span of a timeline: {error!r}")
                    if malformed is None:
                        raise told from error
                    malformed[self.path, at] = told
            at += len(line) + 1

    def _bounds(self, size: int) -> list[tuple[int, int]]:
        """Return the first and last byte of each part."""
        begins = [part.begin for part in self.parts]
        return list(zip(begins, [*begins[1:], max(self._scanned, 0)], strict=True)) if size else []


def _after(data: mmap.mmap, step: int, begin: int, end: int) -> int:
    """Return the byte after the line of the last step span whose index is at most `step`."""
    low, high = begin, end  # a step span that begins below `low` is at most `step`
    found = begin
    while low < high:
        middle = (low + high) // 2
        match = _STEP.search(data, middle, min(end, high + _LONGEST_HEADER))
        if match is None or match.start() >= high or int(match[1]) > step:
            high = middle
        else:
            found = match.end()
            low = match.start() + 1
    return found if found > begin else _first_line(data, begin)


def _next_header(data: mmap.mmap, start: int) -> int:
    """Return the byte of the first header that begins at `start` or later; -1 if there is none."""
    found = data.find(b"\n" + _HEADER, max(0, start - 1))
    return found + 1 if found >= 0 else -1


def _first_line(data: mmap.mmap, begin: int) -> int:
    """Return the byte after a part's header."""
    return data.find(b"\n", begin) + 1
