"""What `shoal watch` sees of a run: the newest values of its files, in bounded memory."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, final

from shoal.diagnosis import Told, Verdict, told_by, verdict
from shoal.errors import ShoalError
from shoal.limits import open_regular
from shoal.run import Account, FollowedAccount, Run
from shoal.run.follow import FollowedFile, sampled_lines
from shoal.run.metrics import NOT_FINITE
from shoal.run.writer import is_written
from shoal.simulate import Prediction, mark_bubbles, recorded_cluster
from shoal.timeline import Breakdown, Kind, Span, Timeline, explain
from shoal.timeline.clocks import OneClock, Origin, Tie, read_ties
from shoal.timeline.lines import parse_span

__all__ = ["Seen", "WatchedRun"]

_POINTS = 1_024
"""Points of a curve; more are thinned to half as many."""
_STEPS = 50
"""Steps of each rank whose spans are kept."""
_SPANS = 20_000
"""Most spans of a rank that are kept."""
_QUIET = 60.0
"""Seconds without news after which a run is said to be quiet."""
_QUIET_AT_END, _OVER = 10.0, 300.0
"""Seconds without news after which a run without a lock has ended: after its last step, before it."""
_TIES = 30.0
"""Seconds after which measurements of the hosts' clocks are read again."""
_LONGEST_REST = 10.0
"""Most seconds between two verdicts of spans that go on to come."""
_HEADER = b'{"timeline":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The state of a run at one look.

    Attributes:
        description: The run's description.
        values: The newest values of steps, by name, with "step"; empty before the first.
        loss: The loss over the whole run, in order of steps.
        tokens_per_second: The speed over the whole run.
        left: Seconds until the last step, at the present pace; None if that is not known.
        account: Where the wall clock of the run went; None if it has no events.
        timeline: The newest recorded steps of all ranks.
        breakdown: Where their time went; None without a finished step.
        verdict: What bounds them, and who is late; it may say that it knows too little.
        alive: Whether the run goes on; None if that is not known.
        quiet: Seconds since the run last wrote.
        unread: Number of lines that could not be read.
    """

    description: Mapping[str, Any]
    values: Mapping[str, float]
    loss: tuple[float, ...]
    tokens_per_second: tuple[float, ...]
    left: float | None
    account: Account | None
    timeline: Timeline
    breakdown: Breakdown | None
    verdict: Verdict
    alive: bool | None
    quiet: float
    unread: int

    @property
    def steps(self) -> int | None:
        """Return the number of steps that the run is to make; None if it does not say."""
        found = (self.description.get("config") or {}).get("steps")
        return found if isinstance(found, int) else None

    @property
    def is_done(self) -> bool:
        """Return whether the run made its last step."""
        return self.steps is not None and self.values.get("step", 0) >= self.steps

    @property
    def has_ended(self) -> bool:
        """Return whether no process works on the run; without a lock, whether it was quiet for long."""
        if self.alive is None:
            return self.quiet > (_QUIET_AT_END if self.is_done else _OVER)
        return not self.alive

    @property
    def state(self) -> str:
        """Return in words whether the run goes on."""
        if self.has_ended:
            return "ended after its last step" if self.is_done else "ended before its last step"
        if self.quiet > _QUIET:
            return f"no news for {self.quiet:.0f} s"
        return "running" if self.alive else "running, as far as can be seen"

    def shares(self) -> dict[str, float]:
        """Return the parts of the newest recorded steps as shares of their time; empty without steps."""
        if self.breakdown is None:
            return {}
        parts = self.breakdown.parts
        return {name: seconds / parts.wall for name, seconds in parts.disjoint().items()}


@final
class WatchedRun:
    """Follow the files of a run.

    Args:
        run: The run.
        rest: Times of a verdict for which the next one waits, up to 10 s: the run's ranks need the cores.
    """

    def __init__(self, run: Run, rest: float = 0.0) -> None:
        self._run = run
        self._metrics = FollowedFile(run.metrics_file)
        self._account = FollowedAccount(run)
        self._ranks: dict[Path, _FollowedRank] = {}
        self._values: dict[str, float] = {}
        self._curves = {name: _Curve() for name in ("loss", "tokens_per_second")}
        self._paces: deque[float] = deque(maxlen=_STEPS)
        self._unread = 0
        self._changed = _last_change(run)
        self._judged: tuple[Timeline, Breakdown | None, Verdict] | None = None
        self._is_judged = False  # whether all spans that were read are
        self._rest, self._rests_until = rest, 0.0
        self._ties: tuple[float, list[Tie]] | None = None
        for line in sampled_lines(run.metrics_file, _POINTS):
            self._take(line)
        for curve in self._curves.values():
            curve.was_sampled(int(self._values.get("step", 0)))
        self._metrics_begun = False

    def look(self) -> Seen:
        """Read what is new, and return the present state."""
        before = int(self._values.get("step", -1))
        new = self._metrics.lines()
        for line in new:
            # The first look meets steps again that the sample had.
            self._take(line, after=-1 if self._metrics_begun else before)
        self._metrics_begun = True
        is_new = bool(new)
        for path in sorted(self._run.timeline.glob("rank-*.jsonl")):
            if path not in self._ranks:
                self._ranks[path] = _FollowedRank(path)
            if self._ranks[path].look():
                is_new, self._is_judged = True, False
        if is_new:
            self._changed = time.time()
        alive = is_written(self._run.checkpoints)
        timeline, breakdown, judged = self._judge(is_over=alive is False)
        return Seen(
            description=self._run.description,
            values=dict(self._values),
            loss=tuple(self._curves["loss"].points),
            tokens_per_second=tuple(self._curves["tokens_per_second"].points),
            left=self._left(),
            account=self._account.look(),
            timeline=timeline,
            breakdown=breakdown,
            verdict=judged,
            alive=alive,
            quiet=max(0.0, time.time() - self._changed),
            unread=self._unread + sum(each.unread for each in self._ranks.values()),
        )

    def _judge(self, is_over: bool) -> tuple[Timeline, Breakdown | None, Verdict]:
        """Return what was measured and the verdict: the last ones if there are no new spans, or in a rest."""
        begin = time.monotonic()
        rests = begin < self._rests_until and not is_over
        if self._judged is not None and (self._is_judged or rests):
            return self._judged
        timeline = self._timeline()
        breakdown = explain(timeline) if timeline.steps() else None
        self._judged = timeline, breakdown, verdict(timeline, **self._told)
        self._is_judged = True
        end = time.monotonic()
        self._rests_until = end + min(self._rest * (end - begin), _LONGEST_REST)
        return self._judged

    @cached_property
    def _told(self) -> Told:
        """What a model of the run's machines tells; nothing if the run does not say enough."""
        try:
            cluster = recorded_cluster(self._run)
            return told_by(None if cluster is None else Prediction.of(self._run, cluster))
        except (ShoalError, KeyError, TypeError, AttributeError, ValueError):
            return told_by(None)

    def _take(self, line: str, after: int = -1) -> None:
        try:
            values = json.loads(line)
            step = int(values["step"])
        except (ValueError, TypeError, KeyError, OverflowError):
            self._unread += bool(line.strip())
            return
        numbers = {name: number for name, value in values.items() if (number := _number(value)) is not None}
        self._values |= numbers | {"step": step}
        if step <= after:
            return
        for name, curve in self._curves.items():
            if name in numbers:
                curve.add(numbers[name])
        if "step_seconds" in numbers:
            self._paces.append(numbers["step_seconds"])

    def _left(self) -> float | None:
        steps = (self._run.description.get("config") or {}).get("steps")
        if not self._paces or not isinstance(steps, int):
            return None
        return max(0, steps - self._values["step"]) * sum(self._paces) / len(self._paces)

    def _timeline(self) -> Timeline:
        ranks = [each for each in self._ranks.values() if each.origin is not None]
        clock = self._clock([each.origin for each in ranks if each.origin is not None])
        origin = min((clock.unix_ns(each.origin) for each in ranks if each.origin is not None), default=0)
        spans = [span for each in ranks for span in each.spans(clock, origin)]
        hosts = {each.rank: each.origin.host for each in ranks if each.origin is not None}
        return mark_bubbles(Timeline(spans, origin_unix_ns=origin, clock_error=clock.error, hosts=hosts))

    def _clock(self, origins: Sequence[Origin]) -> OneClock:
        """Return the one clock of all hosts, from measurements that are read now and then."""
        now = time.monotonic()
        if self._ties is None or now - self._ties[0] > _TIES:
            self._ties = (
                now,
                read_ties(self._run.timeline) if len({each.host for each in origins}) > 1 else [],
            )
        return OneClock.of(origins, self._ties[1])


@final
class _Curve:
    """Points of a curve; each stands for equally many values, as their mean."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._stride = 1
        self._sum, self._count = 0.0, 0

    def was_sampled(self, steps: int) -> None:
        """Note that the points so far were taken evenly from so many steps."""
        self._stride = max(1, steps // max(1, len(self.points)))

    def add(self, value: float) -> None:
        """Add a value."""
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._stride:
            return
        self.points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.points) == 2 * _POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points, self._stride = [(a + b) / 2 for a, b in pairs], 2 * self._stride


@final
class _FollowedRank:
    """The newest spans of one rank's timeline file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = FollowedFile(path)
        self.rank = 0
        self.origin: Origin | None = None  # until there is a header
        self._spans: list[Span] = []
        self.unread = 0
        if (header := _last_header(path)) is not None:
            self._begin(header)

    def look(self) -> bool:
        """Read what is new; return whether there was anything."""
        lines = self._file.lines()
        for line in lines:
            try:
                fields = json.loads(line)
                if "timeline" in fields:
                    self._begin(fields)
                elif self.origin is not None:
                    self._take(parse_span(fields, rank=self.rank, offset=0.0))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                self.unread += bool(line.strip())
        self._forget()
        return bool(lines)

    def spans(self, clock: OneClock, origin: int) -> list[Span]:
        """Return the spans with starts counted from an origin on the one clock, in nanoseconds."""
        own = self.origin
        assert own is not None
        offset = (clock.unix_ns(own) - origin) / 1e9
        if own.host in clock.fits:
            return [_later(span, offset + clock.correction(own, span.start)) for span in self._spans]
        if offset == 0:
            return self._spans
        return [_later(span, offset) for span in self._spans]

    def _take(self, span: Span) -> None:
        if not (math.isfinite(span.start) and 0 <= span.duration < math.inf):
            raise ValueError("a time is not a number")
        self._spans.append(span)

    def _begin(self, header: Mapping[str, Any]) -> None:
        """Begin anew: a process that starts again has a clock of its own."""
        host, monotonic = str(header.get("host", "")), int(header.get("origin_monotonic_ns", 0))
        self.rank, self.origin = int(header["rank"]), Origin(host, int(header["origin_unix_ns"]), monotonic)
        self._spans.clear()

    def _forget(self) -> None:
        starts = sorted(span.start for span in self._spans if span.kind == Kind.STEP)
        if len(starts) > _STEPS:
            self._spans = [span for span in self._spans if span.start >= starts[-_STEPS]]
        del self._spans[:-_SPANS]


def _later(span: Span, seconds: float) -> Span:
    host = None if span.host is None else (span.host[0] + seconds, span.host[1] + seconds)
    names = (span.rank, span.lane, span.kind, span.name)
    rest = (span.bytes, span.group, span.algorithm, span.purpose)
    return Span(*names, span.start + seconds, span.duration, *rest, host)


def _number(value: object) -> float | None:
    """Return a number of the metrics file, also one that is not finite; None for anything else."""
    if isinstance(value, str):
        return float(value) if value in NOT_FINITE else None
    return float(value) if isinstance(value, int | float) else None


def _last_header(path: Path) -> dict[str, Any] | None:
    """Return the last header of a timeline file, which may be far before its newest lines."""
    at, offset, tail = -1, 0, b""
    with BufferedReader(open_regular(path)) as file:
        while chunk := file.read(1 << 22):
            if (found := (tail + chunk).rfind(_HEADER)) >= 0:
                at = offset - len(tail) + found
            offset += len(chunk)
            tail = (tail + chunk)[-len(_HEADER) :]
        if at < 0:
            return None
        file.seek(at)
        try:
            header = json.loads(file.readline(1 << 10))
            return header if {"rank", "origin_unix_ns"} <= header.keys() else None
        except ValueError:
            return None


def _last_change(run: Run) -> float:
    paths = [run.metrics_file, *run.timeline.glob("rank-*.jsonl")]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=time.time())
