"""The own work of each rank in each step: what it does while nobody makes it wait.

The wall time of a phase cannot find a slow rank: a rank that waits in backward for a slow one has a backward
just as long. Own work leaves out all waits for communication, so it differs between ranks.

    loader     data waits, without those for the copy
    copy       data waits for the copy to the device, and copies on the compute lane
    forward, backward, optimizer
               their spans, without waits
    launch     a device idles because its host has not given it the next work yet; not in the other phases
    outside    time of the step that no span explains, and the time since the step before

A rank is idle while it communicates, or waits to, and does not work. The bubble of a schedule is not idle
time.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from shoal.errors import PlanError
from shoal.spec.plan.schedules import Action
from shoal.spec.timeline import Kind, Lane, Span, Timeline
from shoal.spec.timeline.breakdown import WORK, Work, blocked_in, launch_in_gaps, launch_in_work, own_seconds
from shoal.spec.timeline.intervals import Interval, Intervals, StepWindows, intersect, length, subtract, union

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MIDMEAN_TO_MEAN = 1.09  # standard error of the middle half
_MOST_AUTOCORRELATION = 0.9
_SMALLEST_PERIOD = 2


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, from the median distance to the median: outliers do not raise it."""
    middle = median(values)
    return _MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def errors_from_zero(values: Sequence[float]) -> float:
    """Return the mean of the middle half in its standard errors.

    Neighbours that are alike count as fewer values.
    """
    alike = min(max(autocorrelation(values, 1), 0.0), _MOST_AUTOCORRELATION)
    count = len(values) * (1 - alike) / (1 + alike)
    error = _MIDMEAN_TO_MEAN * deviation(values) / math.sqrt(max(count, 1.0))
    quarter = len(values) // 4
    middle = fmean(sorted(values)[quarter : len(values) - quarter])
    return middle / error if error > 0 else math.copysign(math.inf, middle) if middle else 0.0


def autocorrelation(values: Sequence[float], lag: int) -> float:
    """Return the correlation of the values with those so many steps later; 0 for a constant."""
    mean = fmean(values)
    centred = [value - mean for value in values]
    whole = sum(value * value for value in centred)
    if whole <= 0 or lag >= len(values):
        return 0.0
    shared = sum(one * other for one, other in zip(centred, centred[lag:], strict=False))
    return shared / whole * len(values) / (len(values) - lag)


def best_period(values: Sequence[float]) -> tuple[int, float]:
    """Return the number of steps after which the values are most alike again, and the autocorrelation there.

    The smallest such number counts: after a multiple they are as alike.
    """
    lags = range(_SMALLEST_PERIOD, len(values) // 3 + 1)
    if not lags:
        return 0, 0.0
    found = {lag: autocorrelation(values, lag) for lag in lags}
    most = max(found.values())
    if most <= 0:
        return 0, 0.0
    period = next(lag for lag in lags if found[lag] >= 0.8 * most)
    return period, found[period]


def runs_of(positions: Sequence[int], *, gap: int = 0) -> list[list[int]]:
    """Return the runs of ascending positions that follow one another, with gaps of at most so many."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position - runs[-1][-1] <= 1 + gap:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The thresholds of a verdict.

    Attributes:
        warm_up: Steps at the start of the timeline that are not judged.
        fewest_steps: Steps that a verdict needs after these; with fewer it abstains.
        most_steps: The last steps of the timeline that are judged, if no first step is given.
        bottleneck: Share of the step from which on a part other than compute is the bottleneck.
        late: Share of the step by which a rank's own work must exceed that of its peers, in the median step,
            to call the rank a persistent straggler.
        late_stage: The same share where no other rank does the same work, so that stages are compared.
        late_link: Share of the step that slow transfers must cost together.
        late_step: Share of the step by which one step must exceed the rank's typical excess to be a late
            step.
        late_cost: Share of the window's time that late steps must cost together.
        noise_cost: The same share where late steps are irregular or fewer than three: a busy machine has
            such steps too.
        certainty: Number of standard errors by which an excess must differ from zero.
        spike: Number of standard deviations by which a late step must differ from the typical step.
        held_up: Share of the excess in which other ranks must be idle, because this rank has not arrived.
        explained: Share of the excess that one phase must explain to be its cause.
        chance: Probability with which random pauses of the machine would hit one phase only, in all late
            steps; if it is larger, the machine is the cause and not the phase.
        proportional: Ratio of the relative excesses of forward and backward from which on both are slow, so
            that the machine is slow and not a phase.
        late_often: Share of the judged steps from which on late steps are persistent.
        periodic: Autocorrelation from which on late steps are periodic.
        slow_link: Ratio of transfer times, to the same transfer in other groups, from which on a link is
            slow.
        slow_predicted: The same ratio where a transfer has only a prediction to be held to, which may be
            wrong itself.
        least_predicted: Seconds that such a transfer must be predicted to take at least: the latency of
            shorter ones is the host's.
        whole: Share of the collectives of which all members must be found in the timeline.
    """

    warm_up: int = 2
    fewest_steps: int = 20
    most_steps: int = 200
    bottleneck: float = 0.10
    late: float = 0.05
    late_stage: float = 0.08
    late_link: float = 0.03
    late_step: float = 0.08
    late_cost: float = 0.03
    noise_cost: float = 0.06
    certainty: float = 4.0
    spike: float = 3.5
    held_up: float = 0.3
    explained: float = 0.5
    chance: float = 0.05
    proportional: float = 0.4
    late_often: float = 0.7
    periodic: float = 0.4
    slow_link: float = 1.3
    slow_predicted: float = 2.0
    least_predicted: float = 0.0005
    whole: float = 0.9


POLICY = Policy()
"""The thresholds that `shoal report` uses."""


class Cause(StrEnum):
    """Why a rank is late."""

    LOADER = "loader"
    """It waits for its input."""
    COPY = "copy"
    """It waits for the copy of its input to the device."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LAUNCH = "launch"
    """Its host gives the device work too slowly."""
    OUTSIDE = "outside"
    """Time of the loop in no span, such as logging or saving, in a step or after it."""
    LINK = "link"
    """Its communication takes longer than that of others, after all have arrived."""
    MACHINE = "machine"
    """All of its compute is slower, or different phases in different steps: a slow clock or a busy core."""
    STAGE = "stage"
    """Its pipeline stage has more work than others; no other rank has this stage for comparison."""


class Pattern(StrEnum):
    """When a rank is late."""

    PERSISTENT = "persistent"
    PERIODIC = "periodic"
    ONCE = "once"
    IRREGULAR = "irregular"


PHASES = (
    *(Cause.LOADER, Cause.COPY, Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER),
    *(Cause.LAUNCH, Cause.OUTSIDE),
)
"""The parts of a rank's own work, in the order of a step."""


_NAMED = (Kind.WAIT, Kind.COLLECTIVE, Kind.VALIDATION, Kind.CHECKPOINT)
_COPIED = "inputs"
"""The name of a data wait for a copy."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one rank did in one step.

    Attributes:
        seconds: Seconds of each phase.
        idle: The times in which it waits for communication.
        waits: The waits of the compute lane, by the name of what they wait for.
        wall: Seconds of the step.
    """

    seconds: Mapping[Cause, float]
    idle: Intervals
    waits: Mapping[str, Intervals]
    wall: float

    @property
    def total(self) -> float:
        """Return the seconds of all phases."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class OwnWork:
    """What one rank did.

    Attributes:
        rank: The global rank.
        steps: Its steps, by index.
        content: Kinds and names of the spans of a step that compute: ranks with the same content do the same
            work.
        stages: Pipeline stages of the rank, from the names of its spans.
    """

    rank: int
    steps: Mapping[int, StepWork]
    content: frozenset[tuple[tuple[str, str], int]]
    stages: tuple[int, ...]


def own_work(timeline: Timeline, windows: StepWindows, rank: int) -> OwnWork:
    """Return the own work of a rank.

    Args:
        timeline: Timeline of all ranks.
        windows: The steps of this rank.
        rank: The rank.
    """
    spans = timeline.of(rank)
    between, own = _between(windows, spans), own_seconds(spans)
    shared = windows.share_out((span, span) for span in spans)
    steps = {
        index: _step(windows[index], of_step, between.get(index, 0.0), own)
        for index, of_step in shared.items()
    }
    content = _content(shared)
    return OwnWork(rank, steps, content, _stages(name for (_, name), _ in content))


def _step(window: Interval, spans: Sequence[Span], before: float, own: Mapping[Work, float]) -> StepWork:
    whole = [window]

    def moments(kinds: Collection[str], *, copies: bool | None = None) -> Intervals:
        chosen = (
            (span.start, span.stop)
            for span in spans
            if span.kind in kinds
            and span.lane == Lane.COMPUTE
            and (copies is None or copies == (span.name == _COPIED or span.kind == Kind.COPY))
        )
        return intersect(whole, union(chosen))

    blocked = intersect(whole, blocked_in(spans))
    phases: dict[Cause, Intervals] = {}
    taken: Intervals = blocked
    for cause, found in (
        (Cause.FORWARD, moments((Kind.FORWARD,))),
        (Cause.BACKWARD, moments((Kind.BACKWARD,))),
        (Cause.OPTIMIZER, moments((Kind.OPTIMIZER,))),
        (Cause.LOADER, moments((Kind.DATA_WAIT,), copies=False)),
        (Cause.COPY, moments((Kind.DATA_WAIT, Kind.COPY), copies=True)),
    ):
        phases[cause] = subtract(found, taken)
        taken = union([*taken, *found])
    occupied = union(each for found in phases.values() for each in found)
    bubble = subtract(moments((Kind.BUBBLE,)), occupied)
    on_lane = ((span.start, span.stop) for span in spans if span.lane == Lane.COMMUNICATION)
    communication = union([*blocked, *intersect(whole, union(on_lane))])
    unexplained = subtract(whole, union([*occupied, *communication, *bubble]))
    seconds = {cause: length(found) for cause, found in phases.items()}
    seconds[Cause.LAUNCH] = 0.0
    if any(span.host is not None for span in spans):
        gaps = launch_in_gaps(unexplained, spans)
        unexplained = subtract(unexplained, gaps)
        seconds[Cause.LAUNCH] = length(gaps)
        for kind in WORK:
            within = launch_in_work(window, [span for span in spans if span.kind == kind], blocked, own)
            seconds[Cause(kind)] -= within
            seconds[Cause.LAUNCH] += within
    seconds[Cause.OUTSIDE] = length(unexplained) + before
    waits: dict[str, Intervals] = {}
    for span in spans:
        if span.lane == Lane.COMPUTE and span.kind in (Kind.WAIT, Kind.COLLECTIVE):
            waits.setdefault(span.name, []).append((span.start, span.stop))
    return StepWork(
        seconds=seconds,
        idle=subtract(communication, union([*occupied, *bubble])),
        waits={name: union(found) for name, found in waits.items()},
        wall=window[1] - window[0],
    )


def _between(windows: StepWindows, spans: Sequence[Span]) -> dict[int, float]:
    """Return the seconds between each step and the one before, without what has spans of its own."""
    gaps = {
        index: (windows[index - 1][1], start)
        for index, (start, _) in windows.items()
        if index - 1 in windows and windows[index - 1][1] < start
    }
    held = union((span.start, span.stop) for span in spans if span.kind in _NAMED)
    return {index: length(subtract([gap], held)) for index, gap in gaps.items()}


def _content(shared: Mapping[int, Sequence[Span]]) -> frozenset[tuple[tuple[str, str], int]]:
    """Return what a step of the rank consists of: that of its middle step."""
    if not shared:
        return frozenset()
    middle = sorted(shared)[len(shared) // 2]
    counted = Counter((span.kind, span.name) for span in shared[middle] if span.kind in WORK)
    return frozenset(counted.items())


def _stages(names: Iterable[str]) -> tuple[int, ...]:
    found = set()
    for name in names:
        with contextlib.suppress(PlanError):
            found.add(Action.parse(name).stage)
    return tuple(sorted(found))
