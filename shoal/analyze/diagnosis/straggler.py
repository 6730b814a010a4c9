"""Stragglers: ranks for which others wait, why, and when.

Which steps of a rank are late, and their pattern.

A rhythm is looked for first, in the whole series: fifteen delays, one in every fourth step, are certain
together, though each alone is within the noise. Then a row of late steps is looked for, for the same reason,
and at last single steps that exceed the noise by far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Self

from shoal.analyze.diagnosis.compute_time import (
    PHASES,
    Cause,
    OwnWork,
    Pattern,
    Policy,
    autocorrelation,
    best_period,
    deviation,
    errors_from_zero,
    runs_of,
)

_FEWEST = 3
"""Fewer late steps than these may be noise, whatever their pattern."""


@dataclass(frozen=True, slots=True)
class LateSteps:
    """The late steps of a rank.

    Attributes:
        pattern: When they are late.
        period: Steps from one to the next, if they are periodic; else None.
        positions: Their positions among the judged steps.
    """

    pattern: Pattern
    period: int | None
    positions: Sequence[int]


def late_steps(
    excess: Sequence[float], held: Sequence[float], wall: float, policy: Policy
) -> LateSteps | None:
    """Return the late steps; None if there are none, or if they cost too little to be more than noise.

    Args:
        excess: Seconds by which each step's own work exceeds that of peers.
        held: Seconds for which the rank held others up in each step.
        wall: Seconds of the median step.
        policy: The thresholds.
    """
    typical = max(median(excess), 0.0)
    more = [seconds - typical for seconds in excess]
    # Who is late at the end of a step holds others up in the next.
    soon = [max(pair) for pair in zip(held, [*held[1:], 0.0], strict=True)]
    found = (
        _in_rhythm(more, soon, wall, policy)
        or _in_a_row(more, soon, wall, policy)
        or _far_from_noise(more, soon, wall, policy)
    )
    cost = sum(more[position] for position in found.positions)
    is_noise = found.pattern == Pattern.IRREGULAR or len(found.positions) < _FEWEST
    least = (policy.noise_cost if is_noise else policy.late_cost) * wall * len(excess)
    return found if found.positions and cost >= least else None


def _in_rhythm(more: Sequence[float], soon: Sequence[float], wall: float, policy: Policy) -> LateSteps | None:
    """Return the steps of a rhythm: those at one place of its period are late."""
    limit = policy.spike * deviation(more)
    calm = [min(max(seconds, -limit), limit) for seconds in more] if limit > 0 else more
    period, strength = best_period(calm)
    if strength < policy.periodic or strength - autocorrelation(calm, period // 2) < policy.periodic:
        return None
    places = [range(place, len(more), period) for place in range(period)]
    late = [
        position
        for place in places
        if len(place) >= _FEWEST
        and median(more[position] for position in place) >= policy.late_step * wall
        and errors_from_zero([more[position] for position in place]) >= policy.certainty
        for position in place
    ]
    if not late or fmean(soon[each] for each in late) < policy.held_up * fmean(more[each] for each in late):
        return None
    return LateSteps(Pattern.PERIODIC, period, sorted(late))


def _in_a_row(more: Sequence[float], soon: Sequence[float], wall: float, policy: Policy) -> LateSteps | None:
    """Return the row of steps that has the largest sum, where each is compared with half of a late step."""
    limit = policy.spike * deviation(more)
    best, total, first, row = 0.0, 0.0, 0, range(0)
    for position, seconds in enumerate(more):
        if total <= 0:
            total, first = 0.0, position
        total += (min(seconds, limit) if limit > 0 else seconds) - policy.late_step * wall / 2
        if total > best:
            best, row = total, range(first, position + 1)
    late = [more[position] for position in row]
    if len(row) < _FEWEST or median(late) < policy.late_step * wall:
        return None
    if errors_from_zero(late) < policy.certainty:
        return None
    if fmean(soon[each] for each in row) < policy.held_up * fmean(late):
        return None
    is_most = len(row) >= policy.late_often * len(more)
    return LateSteps(Pattern.PERSISTENT if is_most else Pattern.ONCE, None, row)


def _far_from_noise(more: Sequence[float], soon: Sequence[float], wall: float, policy: Policy) -> LateSteps:
    """Return the steps that exceed the noise by far."""
    least = max(policy.late_step * wall, policy.spike * deviation(more))
    late = [
        position
        for position, seconds in enumerate(more)
        if seconds >= least and soon[position] >= policy.held_up * seconds
    ]
    if len(late) >= policy.late_often * len(more):
        return LateSteps(Pattern.PERSISTENT, None, late)
    row = max(runs_of(late, gap=_FEWEST), key=len, default=[])
    if len(row) >= policy.late_often * len(late):
        return LateSteps(Pattern.ONCE, None, row)
    flags = [float(position in set(late)) for position in range(len(more))]
    period, strength = best_period(flags)
    is_regular = strength >= policy.periodic and len(late) >= _FEWEST
    if is_regular and strength - autocorrelation(flags, period // 2) >= policy.periodic:
        return LateSteps(Pattern.PERIODIC, period, late)
    return LateSteps(Pattern.IRREGULAR, None, late)


_SURE_PHASE = 3.0  # standard errors, for forward and backward to be both slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank, or a link, for which others wait.

    Attributes:
        ranks: The rank; for a link whose ends cannot be told apart, all that may be at fault.
        cause: Why it is late.
        pattern: When it is late.
        period: Steps from one late step to the next, if it is periodic; else None.
        seconds: Seconds by which it is longer than its peers, as the mean over the judged steps.
        held_up: Seconds a step for which others were idle because it had not arrived, as the mean.
        share: `seconds` as a share of the step.
        steps: The late steps; all judged steps if it is persistent.
        phases: Seconds of excess of each phase, as the mean over the late steps.
        evidence: What was measured, as a sentence.
        advice: What to do next, as a sentence.
    """

    ranks: tuple[int, ...]
    cause: Cause
    pattern: Pattern
    period: int | None
    seconds: float
    held_up: float
    share: float
    steps: tuple[int, ...]
    phases: Mapping[str, float]
    evidence: str
    advice: str

    @classmethod
    def of_link(
        cls, ranks: tuple[int, ...], seconds: float, wall: float, steps: Sequence[int], evidence: str
    ) -> Self:
        """Return the finding that a link is slow in all judged steps.

        Args:
            ranks: The ranks that may be at its ends.
            seconds: Seconds a step that it costs.
            wall: Seconds of a step.
            steps: The judged steps.
            evidence: What was measured, as a sentence.
        """
        return cls(
            ranks=ranks,
            cause=Cause.LINK,
            pattern=Pattern.PERSISTENT,
            period=None,
            seconds=seconds,
            held_up=seconds,
            share=seconds / wall,
            steps=tuple(steps),
            phases={str(Cause.LINK): seconds},
            evidence=evidence,
            advice="Measure the link with `shoal probe` on both hosts, and look at its cable, port and "
            "driver.",
        )


@dataclass(frozen=True, slots=True)
class _Excess:
    """By how much a rank's own work exceeds that of its peers.

    Attributes:
        rank: The rank.
        steps: The judged steps, ascending.
        phases: Seconds of each phase, step by step.
        total: Their sum, step by step.
        typical: The seconds that its peers need for each phase, as medians.
        has_peers: Whether other ranks do the same work; else it is compared with all others.
    """

    rank: int
    steps: Sequence[int]
    phases: Mapping[Cause, Sequence[float]]
    total: Sequence[float]
    typical: Mapping[Cause, float]
    has_peers: bool


def find_stragglers(
    works: Mapping[int, OwnWork],
    held_up: Mapping[int, Mapping[int, float]],
    steps: Sequence[int],
    policy: Policy,
) -> list[Straggler]:
    """Return the ranks that others wait for, the most expensive first.

    Args:
        works: The own work of each rank.
        held_up: Seconds for which each rank held others up, by step.
        steps: The steps to judge, which all ranks finished.
        policy: The thresholds.
    """
    wall = median(works[rank].steps[step].wall for rank in works for step in steps)
    found = []
    for rank in works:
        excess = _excess(works, rank, steps)
        held = [held_up[rank][step] for step in steps]
        late = late_steps(excess.total, held, wall, policy)
        straggler = _persistent(excess, held, wall, late, policy)
        if straggler is None and late is not None:
            straggler = _sometimes(excess, held, wall, late, policy)
        if straggler is not None:
            found.append(straggler)
    return sorted(found, key=lambda each: -each.seconds)


def peers_of(works: Mapping[int, OwnWork], rank: int) -> list[int]:
    """Return the other ranks that do the same work."""
    return [other for other in works if other != rank and works[other].content == works[rank].content]


def _excess(works: Mapping[int, OwnWork], rank: int, steps: Sequence[int]) -> _Excess:
    peers = peers_of(works, rank)
    compared = peers or [other for other in works if other != rank]

    def of_peers(cause: Cause) -> list[float]:
        return [median(works[peer].steps[step].seconds[cause] for peer in compared) for step in steps]

    others = {cause: of_peers(cause) for cause in PHASES}
    phases = {
        cause: [
            works[rank].steps[step].seconds[cause] - theirs
            for step, theirs in zip(steps, others[cause], strict=True)
        ]
        for cause in PHASES
    }
    total = [sum(each) for each in zip(*phases.values(), strict=True)]
    typical = {cause: median(others[cause]) for cause in PHASES}
    return _Excess(rank, steps, phases, total, typical, bool(peers))


def _persistent(
    excess: _Excess, held: Sequence[float], wall: float, late: LateSteps | None, policy: Policy
) -> Straggler | None:
    """Return the straggler that is late in most steps, also in those that are not among its late steps."""
    apart = set(late.positions) if late is not None and late.pattern != Pattern.PERSISTENT else set()
    rest = [seconds for position, seconds in enumerate(excess.total) if position not in apart]
    share = policy.late if excess.has_peers else policy.late_stage
    if len(rest) < len(excess.total) * (1 - policy.late_often) or median(rest) < share * wall:
        return None
    seconds = median(excess.total)
    if errors_from_zero(rest) < policy.certainty or fmean(held) < policy.held_up * seconds:
        return None
    phases = {cause: median(values) for cause, values in excess.phases.items()}
    cause = _cause(excess, phases, range(len(excess.steps)), policy) if excess.has_peers else Cause.STAGE
    return _straggler(excess, held, wall, cause, Pattern.PERSISTENT, None, range(len(held)), phases)


def _sometimes(
    excess: _Excess, held: Sequence[float], wall: float, found: LateSteps, policy: Policy
) -> Straggler:
    """Return the straggler that is late in some steps only."""
    late = found.positions
    phases = {
        cause: fmean(values[position] for position in late) - median(values)
        for cause, values in excess.phases.items()
    }
    cause = _cause(excess, phases, late, policy)
    if cause in excess.typical and found.pattern != Pattern.PERIODIC:
        share = excess.typical[cause] / max(sum(excess.typical.values()), 1e-12)
        if share ** len(late) > policy.chance:
            cause = Cause.MACHINE
    return _straggler(excess, held, wall, cause, found.pattern, found.period, late, phases)


def _cause(excess: _Excess, phases: Mapping[Cause, float], late: Sequence[int], policy: Policy) -> Cause:
    """Return the phase that explains the excess; the machine if all compute is slower, or no phase does."""
    both = [
        phases[cause] / excess.typical[cause]
        for cause in (Cause.FORWARD, Cause.BACKWARD)
        if excess.typical[cause] > 0
    ]
    sure = len(late) == 1 or all(
        errors_from_zero([excess.phases[cause][position] for position in late]) >= _SURE_PHASE
        for cause in (Cause.FORWARD, Cause.BACKWARD)
    )
    if len(both) == 2 and min(both) > 0 and min(both) >= policy.proportional * max(both) and sure:
        together = phases[Cause.FORWARD] + phases[Cause.BACKWARD]
        if together >= policy.explained * sum(phases.values()):
            return Cause.MACHINE
    most = max(phases, key=lambda cause: phases[cause])
    positive = sum(max(seconds, 0.0) for seconds in phases.values())
    return most if phases[most] >= policy.explained * positive else Cause.MACHINE


def _straggler(
    excess: _Excess,
    held: Sequence[float],
    wall: float,
    cause: Cause,
    pattern: Pattern,
    period: int | None,
    late: Sequence[int],
    phases: Mapping[Cause, float],
) -> Straggler:
    typical = 0.0 if pattern == Pattern.PERSISTENT else median(excess.total)
    if pattern == Pattern.PERSISTENT:
        seconds = median(excess.total)
    else:
        seconds = sum(excess.total[position] - typical for position in late) / len(held)
    compared = "its peers" if excess.has_peers else "the other ranks"
    when = {
        Pattern.PERSISTENT: "in the median step",
        Pattern.PERIODIC: f"every {period} steps",
        Pattern.ONCE: f"in {len(late)} step{'s' * (len(late) > 1)} from step {excess.steps[late[0]]} on",
        Pattern.IRREGULAR: f"in {len(late)} of {len(held)} steps",
    }[pattern]
    by = seconds if pattern == Pattern.PERSISTENT else seconds * len(held) / len(late)
    main = ", ".join(
        f"{cause} {each * 1e3:+.3g} ms" for cause, each in _largest(phases, sum(phases.values()))
    )
    return Straggler(
        ranks=(excess.rank,),
        cause=cause,
        pattern=pattern,
        period=period,
        seconds=seconds,
        held_up=fmean(held),
        share=seconds / wall,
        steps=tuple(excess.steps[position] for position in late),
        phases={str(cause): each for cause, each in phases.items()},
        evidence=f"Rank {excess.rank} works {by * 1e3:.3g} ms longer than {compared} {when} ({main}). "
        f"Others were idle for {fmean(held) * 1e3:.3g} ms a step until it arrived at their collectives.",
        advice=_ADVICE[cause],
    )


def _largest(phases: Mapping[Cause, float], total: float) -> list[tuple[Cause, float]]:
    ordered = sorted(phases.items(), key=lambda each: -each[1])
    return [each for each in ordered if each[1] >= 0.1 * total][:3]


_ADVICE = {
    Cause.LOADER: "Read its data from a faster disk, or prepare it in more processes.",
    Cause.COPY: "Look at the path from its host's memory to its device: pinned memory, PCIe link, NUMA node.",
    Cause.FORWARD: "Look for work that only this rank does in forward: longer samples, hooks, logging.",
    Cause.BACKWARD: "Look for work that only this rank does in backward: hooks, unfused gradients.",
    Cause.OPTIMIZER: "Look at its optimizer: more parameters than others, or state in slower memory.",
    Cause.LAUNCH: "Its host gives work too slowly: free its cores, or set compile=blocks in the Plan.",
    Cause.OUTSIDE: "Look at what its loop does outside of spans: logging, saving, garbage collection.",
    Cause.LINK: "Measure the link with `shoal probe` on its host, and look at its cable, port and driver.",
    Cause.MACHINE: "Look at the machine: clocks that are throttled, a busy core, another process.",
    Cause.STAGE: "Move layers away from this stage, or let `shoal plan` split the model by measured costs.",
}
