"""Which steps of a rank are late, and their pattern.

A rhythm is looked for first, in the whole series: fifteen delays, one in every fourth step, are certain
together, though each alone is within the noise. Then a row of late steps is looked for, for the same reason,
and at last single steps that exceed the noise by far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from shoal.diagnosis.cause import Pattern
from shoal.diagnosis.policy import Policy
from shoal.diagnosis.series import autocorrelation, best_period, deviation, errors_from_zero, runs_of

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
