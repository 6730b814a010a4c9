"""The account of a run: the seconds of training steps that count, and the seconds lost by cause.

An Account divides the wall clock of a run, from the first command that started it to its last event, over all
its restarts. Each second has one cause, so that steps and losses sum to the wall clock:

    steps       training steps whose result is in the run's state
    start       from the command to the first step: imports, the model, the data, process groups
    compile     torch.compile, within steps
    load        reading a checkpoint, or weights to begin from
    save        training waits for a checkpoint
    validation  training waits for the loss on held-out data
    detection   from the last step that was finished to the moment at which a failure was noticed
    recovery    from that moment to the next step, without `load`: new groups of ranks, new processes
    repeated    steps whose result was lost, since the state after a failure was older
    waiting     no rank runs: from the end of one command, or of what is known of it, to the next one
    other       the rest: the host's work between steps, and the end of the command

The time that the first rank spends stands for all ranks. If everything was killed at once, nobody noted the
failure: the time up to the next command is `waiting`, and its start is `recovery`.

Where the first rank was killed, its last line may be older than its last step. If these steps are in the
state that the run goes on from, they count, with as many seconds each as the steps before them. If not, their
seconds stay in `detection` or `waiting`.

The events of a run: when it was launched, what its time went into, when it failed and ended.

events.jsonl has one JSON object a line. Each has `time`, in seconds since the epoch, and `event`:

    {"time":.., "event":"began", "launched":.., "ranks":8}         a group of ranks formed; `launched` is when
                                                                   the command that started it began
    {"time":.., "event":"loaded", "step":40}                       the ranks hold the state after this step
    {"time":.., "event":"spent", "step":52, "seconds":{"steps":..}}  how the time since the line before was
                                                                   spent, and the last step that was made
    {"time":.., "event":"failed", "reason":".."}                   a failure was noticed
    {"time":.., "event":"ended", "reason":".."}                    the ranks, or their launcher, end

The first rank writes it, and the launcher notes failures and its end. Each line is one write at the end of
the file, so that lines of two processes do not mix. A "spent" line comes after the first step of a
group of ranks, then at most once in a second and in a thousandth of the run's age: a run of a month leaves
some ten thousand lines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

from shoal.limits import open_regular
from shoal.spec.run.directory import Run

Event = dict[str, Any]
"""One event: a JSON object with `time` and `event`."""

_LONGEST_REASON = 500


def write_event(path: Path, event: str, *, at: float | None = None, **values: Any) -> Event:
    """Append an event to a run's file, if the run is there; return the event.

    A full disk loses the event, and stops nothing. A line that another process left torn is ended first.

    Args:
        path: The file of events.
        event: What happened.
        at: When, in seconds since the epoch; by default now.
        values: What else is known of it.
    """
    told: Event = {"time": time.time() if at is None else at, "event": event, **values}
    if "reason" in told:
        told["reason"] = str(told["reason"])[:_LONGEST_REASON]
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(file).st_size
            is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, b"\n" * is_torn + json.dumps(told).encode() + b"\n")
        finally:
            os.close(file)
    return told


def read_events(paths: Iterable[Path]) -> list[Event]:
    """Return the events of some files in the order of their times; see `parse_events`."""
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError), open_regular(path) as file:
            lines += file.read().decode("utf-8-sig", errors="replace").splitlines()
    return parse_events(lines)


def parse_events(lines: Iterable[str]) -> list[Event]:
    """Return the events of some lines in the order of their times; lines that cannot be read are left out."""
    found: list[Event] = []
    for line in lines:
        try:
            told = json.loads(line)
            if isinstance(told["event"], str) and math.isfinite(told["time"]):
                found.append(told)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
    return sorted(found, key=lambda told: float(told["time"]))


CAUSES = (
    "start",
    "compile",
    "load",
    "save",
    "validation",
    "detection",
    "recovery",
    "repeated",
    "waiting",
    "other",
)
"""What seconds are lost by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where the wall clock of a run went.

    Attributes:
        began: When the first command began, in seconds since the epoch.
        ended: The time of the last event.
        step: The last step whose result is in the run's state.
        count: Number of steps that count; fewer than `step` if the run began from the state of another.
        steps: Seconds of the steps that count.
        lost: Seconds lost by each of `CAUSES`.
        failures: Failures since which steps were made, or that broke off steps.
        launches: Commands that started ranks.
        ranks: Number of ranks that ran last.
        device_seconds: Seconds of all ranks, without the time in which none ran.
    """

    began: float
    ended: float
    step: int
    count: int
    steps: float
    lost: Mapping[str, float]
    failures: int
    launches: int
    ranks: int
    device_seconds: float

    @property
    def wall(self) -> float:
        """Seconds from the first command to the last event: of steps, and of all that was lost."""
        return self.ended - self.began

    @property
    def running(self) -> float:
        """Seconds in which ranks ran."""
        return self.wall - self.lost["waiting"]

    @property
    def goodput(self) -> float:
        """Share of the wall clock in which steps were made that count."""
        return self.steps / self.wall if self.wall > 0 else 0.0

    def seconds_left(self, steps: int) -> float:
        """Return the seconds that so many more steps take with failures, saves and validations as before.

        Starts, compiling and waiting are not expected again. Infinity if no step counts yet.
        """
        if not self.count:
            return math.inf
        once = sum(self.lost[cause] for cause in ("start", "compile", "waiting"))
        return steps * (self.wall - once) / self.count

    def values(self) -> dict[str, float]:
        """Return the figures by name, as metrics."""
        return {
            "goodput": self.goodput,
            "wall_seconds": self.wall,
            "counted_step_seconds": self.steps,
            **{f"lost_seconds_{cause}": seconds for cause, seconds in self.lost.items()},
            "failures": self.failures,
            "device_hours": self.device_seconds / 3600,
        }


def account(run: Run | str | os.PathLike[str]) -> Account | None:
    """Return where the time of a run went, over all its restarts; None if the run has no events.

    Args:
        run: The run, or its directory.

    Raises:
        RunError: The path is not a run.
    """
    opened = run if isinstance(run, Run) else Run.open(Path(run))
    return Ledger(read_events([opened.events_file, opened.members_file])).account()


@final
class Ledger:
    """Keep the account of a run while events come, in the order of their times.

    Args:
        events: Events to begin with. Those that are malformed are left out.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._began: float | None = None
        self._at = 0.0  # the time up to which all seconds have their cause
        self._lost = dict.fromkeys(CAUSES, 0.0)
        self._made: list[tuple[int, int, float]] = []  # steps after, up to, and their seconds
        self._counted = 0.0
        self._step = 0
        self._ranks = 0
        self._device_seconds = 0.0
        self._failures = self._launches = 0
        self._launched = -math.inf
        self._is_up = False  # ranks run, as far as is known
        self._has_stepped = False  # in the present group of ranks
        self._is_broken = False  # a failure was noticed, and no step was made since
        self._gap = ("other", 0.0)  # the last time without a line, and what it is lost by
        self._starting = "start"  # what the time before the first step is lost by
        for event in events:
            self.take(event)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take note of an event; nothing is known of the time before ranks began."""
        if self._began is None and event.get("event") != "began":
            return
        try:
            time = _number(event["time"])
            match event["event"]:
                case "began":
                    launched = min(time, _number(event["launched"]))
                    self._begin(time, launched, int(_number(event["ranks"])))
                case "loaded":
                    self._go_back(int(_number(event["step"])))
                case "spent":
                    seconds = {str(name): _number(value) for name, value in event["seconds"].items()}
                    self._spend(time, int(_number(event["step"])), seconds)
                case "failed" | "lost":
                    self._fail(time)
                case "ended":
                    self._end(time)
        except (KeyError, TypeError, ValueError, AttributeError):
            return

    def account(self) -> Account | None:
        """Return the account up to the last event; None before the first."""
        if self._began is None:
            return None
        return Account(
            began=self._began,
            ended=self._at,
            step=self._step,
            count=sum(last - after for after, last, _ in self._made),
            steps=self._counted,
            lost=dict(self._lost),
            failures=self._failures,
            launches=self._launches,
            ranks=self._ranks,
            device_seconds=self._device_seconds,
        )

    def _begin(self, time: float, launched: float, ranks: int) -> None:
        if self._began is None:
            self._began = self._at = launched
        if launched > self._launched:
            if self._is_up and not self._is_broken:  # the command before was killed, and nobody noted it
                self._note_failure()
            self._launched = launched
            self._launches += 1
            self._pass_gap("waiting", launched, ranks=0)
            self._starting = "recovery" if self._is_broken else "start"
        else:  # another group of ranks under the same command
            self._starting = "recovery"
        self._ranks = ranks
        self._pass(self._starting, time)
        self._is_up, self._has_stepped = True, False

    def _go_back(self, step: int) -> None:
        """Note that the ranks hold the state after a step: later ones, if made, must be made again."""
        while self._made and self._made[-1][1] > step:
            after, last, seconds = self._made.pop()
            kept = seconds * (step - after) / (last - after) if step > after else 0.0
            self._counted -= seconds - kept
            self._lost["repeated"] += seconds - kept
            if kept:
                self._made.append((after, step, kept))
        if self._made and step > self._step:
            after, last, seconds = self._made[-1]
            cause, lost = self._gap
            made = min(lost, seconds / (last - after) * (step - self._step))
            self._lost[cause] -= made
            self._counted += made
            self._made.append((self._step, step, made))
        self._gap = ("other", 0.0)
        self._step = step

    def _spend(self, time: float, step: int, seconds: Mapping[str, float]) -> None:
        passed, told = max(0.0, time - self._at), sum(seconds.values())
        # A part of it may have a cause already, such as a failure that another process noted.
        scale = min(1.0, passed / told) if told > 0 else 0.0
        for name, value in seconds.items():
            if name == "steps":
                continue
            cause = self._starting if name == "start" else name
            self._lost[cause if cause in self._lost else "other"] += value * scale
        self._lost["other"] += max(0.0, passed - told)
        self._device_seconds += passed * self._ranks
        self._at = max(self._at, time)
        made = seconds.get("steps", 0.0) * scale
        if step > self._step:
            self._made.append((self._step, step, made))
            self._counted += made
            self._step = step
            self._has_stepped, self._is_broken = True, False
        else:  # what a step took that was broken off
            self._lost["other"] += made

    def _fail(self, time: float) -> None:
        if self._is_broken or not self._is_up:
            self._pass("recovery", time)
            return
        self._pass_gap("detection", time)
        self._note_failure()

    def _note_failure(self) -> None:
        """Take note of a failure; one before the first step is not counted: something given was wrong."""
        self._is_broken = True
        self._failures += self._has_stepped

    def _end(self, time: float) -> None:
        self._pass("recovery" if self._is_broken else "other", time)
        self._is_up = False

    def _pass_gap(self, cause: str, until: float, ranks: int | None = None) -> None:
        """Give the seconds since the last line to a cause; steps may have been made in them."""
        before = self._lost[cause]
        self._pass(cause, until, ranks)
        if self._lost[cause] > before:
            self._gap = cause, self._lost[cause] - before

    def _pass(self, cause: str, until: float, ranks: int | None = None) -> None:
        """Give the seconds up to a time to a cause."""
        seconds = max(0.0, until - self._at)
        self._lost[cause] += seconds
        self._device_seconds += seconds * (self._ranks if ranks is None else ranks)
        self._at = max(self._at, until)


def _number(value: Any) -> float:
    """Return a number that can count something."""
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value} counts nothing")
    return number


_WARM_UP_STEPS = 2  # steps in which caches fill and kernels are chosen


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a run; a figure that is not known is None.

    Attributes:
        total: Tokens/s over all ranks.
        per_device: Tokens/s of a device.
        mfu: Model FLOP/s as a share of the device's peak.
    """

    total: float | None
    per_device: float | None
    mfu: float | None


def speed_of(metrics: Sequence[Mapping[str, Any]], description: Mapping[str, Any]) -> Speed:
    """Return the speed of the median step after warm-up.

    Args:
        metrics: Metrics from `read_metrics`.
        description: The content of run.json; it has the FLOP of a token, forward and backward, and the peak
            of one device.
    """
    total = tokens_per_second(metrics, description.get("since_step"))
    world_size = description.get("world_size")
    flops_per_token = (description.get("model") or {}).get("flops_per_token")
    peak_flops = (description.get("device") or {}).get("peak_flops")
    per_device = total / world_size if total is not None and world_size else None
    mfu = None
    if per_device is not None and flops_per_token and peak_flops:
        mfu = per_device * flops_per_token / peak_flops
    return Speed(total, per_device, mfu)


def tokens_per_second(metrics: Sequence[Mapping[str, Any]], since_step: int | None) -> float | None:
    """Return the tokens/s, over all ranks, of the median step after warm-up; None if no step has them.

    The median ignores a step that was held up by a checkpoint or another process.

    Args:
        metrics: Metrics from `read_metrics`.
        since_step: The first step under the present layout; None for all.
    """
    rates = [
        values["tokens_per_second"]
        for values in metrics
        if "tokens_per_second" in values and values["step"] >= (since_step or 0)
    ]
    return median(rates[_WARM_UP_STEPS:] or rates) if rates else None
