"""The differences between two runs, value by value, each with its verdict."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any, Self

from shoal.analyze.compare.significance import (
    FEWEST,
    LEVEL,
    PAIRED_BLOCKS,
    Test,
    compare_pairs,
    compare_series,
    holm,
    mean_of_block,
    mean_of_differences,
)
from shoal.predict.simulate import measured_timeline
from shoal.spec.run import Run
from shoal.spec.timeline.series import collective_series, kind_series, step_starts

_NEAR = 2.0
"""Steps after its own begin within which the partner of a step begins."""
_LEAST_SHARE = 0.9
"""Share of the steps of the run with fewer steps that must have a partner."""


def pairs(first: Sequence[float], second: Sequence[float]) -> list[tuple[int, int]]:
    """Return for each step of the run with fewer steps the next step that the other run began.

    The nearest step would not do: which one is nearest depends on how long steps take, so that the choice
    would change what is measured. The list is empty if less than nine tenths of the steps have a partner
    within two steps: then the runs were not side by side.

    Args:
        first: When the steps of one run began, in seconds, ascending.
        second: When those of the other began, on the same clock.

    Returns:
        Places in the two sequences, in order of time.
    """
    if len(first) > len(second):
        return [(one, other) for other, one in pairs(second, first)]
    if len(first) < 2:
        return []
    near = _NEAR * median(later - start for start, later in itertools.pairwise(first))
    found = [(place, bisect_left(second, start)) for place, start in enumerate(first)]
    found = [
        (one, other) for one, other in found if other < len(second) and second[other] - first[one] <= near
    ]
    return found if len(found) >= _LEAST_SHARE * len(first) else []


WARM_UP_STEPS = 2
"""Steps of a run that are left out: caches fill, kernels are chosen, memory is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValues:
    """The values of one run, without its first steps.

    Attributes:
        path: Directory of the run.
        plan: Its Plan; "" if it does not say.
        ranks: Number of its ranks; 0 if it does not say.
        starts: When the steps of the timeline began, in seconds on the wall clock, in order of time.
        kinds: Seconds of steps by kind, in order of time; empty without a timeline.
        collectives: Seconds of steps by collective, in order of time.
        tokens_per_second: Tokens/s of steps, in order of time.
        memory: The peak of the rank that holds most, in bytes; None if it was not measured.
    """

    path: str
    plan: str
    ranks: int
    starts: tuple[float, ...] = ()
    kinds: Mapping[str, tuple[float, ...]]
    collectives: Mapping[str, tuple[float, ...]]
    tokens_per_second: tuple[float, ...]
    memory: int | None

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return the values of the steps under the run's present Plan.

        Raises:
            ShoalError: A file of the run is malformed.
        """
        described = run.description
        timeline = measured_timeline(run)
        has_steps = bool(timeline.steps())
        since = described.get("since_step") or 0
        rates = {
            values["step"]: values["tokens_per_second"]
            for values in run.metrics()
            if "tokens_per_second" in values and values["step"] >= since
        }
        peaks = [each.peak for each in run.memory()]
        return cls(
            path=str(run.path),
            plan=described.get("plan") or "",
            ranks=described.get("world_size") or 0,
            starts=_after_warm_up(step_starts(timeline)),
            kinds=_in_order(kind_series(timeline)) if has_steps else {},
            collectives=_in_order(collective_series(timeline)) if has_steps else {},
            tokens_per_second=_after_warm_up(rates),
            memory=max(peaks) if peaks else None,
        )


def _in_order(series: Mapping[str, Mapping[int, float]]) -> dict[str, tuple[float, ...]]:
    return {name: _after_warm_up(values) for name, values in series.items()}


def _after_warm_up(by_step: Mapping[int, Any]) -> tuple[float, ...]:
    return tuple(by_step[step] for step in sorted(by_step))[WARM_UP_STEPS:]


_SHARE_OF_STEP = 0.001
"""Share of a step below which the seconds of a kind, and changes of them, are left out."""
_NOTHING = 1e-9
"""Seconds that a timeline file cannot tell from 0."""


class Verdict(StrEnum):
    """The verdict on a difference between two runs."""

    HIGHER = "higher"
    LOWER = "lower"
    SAME = "no difference shown"
    DRIFT = "not told from drift"
    FEW = "too few steps"
    """Fewer than `FEWEST`; without a test."""
    ALONE = "only in one run"
    UNTESTED = "one value each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value of two runs.

    Attributes:
        name: A kind of span, a collective, "mean step", "tokens/s" or "memory".
        group: "kinds", "collectives" or "run".
        unit: "s", "tokens/s" or "bytes".
        before: The value of the first run.
        after: The value of the second.
        test: The test of the steps; None if there is none.
        probability: The probability of the test, corrected for the number of tests in the group.
        verdict: The verdict.
    """

    name: str
    group: str
    unit: str
    before: float
    after: float
    test: Test | None = None
    probability: float | None = None
    verdict: Verdict

    @property
    def change(self) -> float | None:
        """The change as a share of the value before: of blocks if there is a test; None from nothing."""
        if not self.before:
            return None
        return (self.after - self.before if self.test is None else self.test.difference) / self.before


def differences(before: RunValues, after: RunValues) -> list[Difference]:
    """Return the differences between two runs.

    If both trained at the same time, steps are compared in pairs.

    Kinds and collectives that take less than a thousandth of a step in both runs are left out. The kinds,
    the mean step and tokens/s are one group for Holm's correction, the collectives another.
    """
    step = _median(before.kinds.get("step", ()))
    rows = _Rows(before.starts, after.starts, step)
    kinds: list[Difference] = []
    collectives: list[Difference] = []
    if before.kinds and after.kinds:
        collectives = rows.of("collectives", before.collectives, after.collectives)
        kinds = rows.of("kinds", before.kinds, after.kinds)
        steps, others = before.kinds["step"], after.kinds["step"]
        kinds.append(rows.row("mean step", "kinds", "s", steps, others, by_mean=True))
    if before.tokens_per_second and after.tokens_per_second:
        rates, others = before.tokens_per_second, after.tokens_per_second
        kinds.append(rows.row("tokens/s", "run", "tokens/s", rates, others))
    drift = _drift_of_step(kinds)
    judged = [*_judged(kinds, step, drift), *_judged(collectives, step, drift)]
    if before.memory is not None and after.memory is not None:
        judged.append(_untested("memory", "run", "bytes", before.memory, after.memory, Verdict.UNTESTED))
    return judged


class _Rows:
    """Makes the rows of two runs, not judged yet.

    Args:
        first: When the steps of the run before began.
        second: When those of the run after began.
        step: Seconds of a step.
    """

    def __init__(self, first: Sequence[float], second: Sequence[float], step: float) -> None:
        self.counts = len(first), len(second)
        self.pairs = pairs(first, second)
        self.least = max(_SHARE_OF_STEP * step, _NOTHING)

    def of(
        self, group: str, before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
    ) -> list[Difference]:
        """Return a row for each name whose seconds count in one of the runs."""
        rows = []
        for name in dict.fromkeys([*before, *after]):
            first, second = before.get(name, ()), after.get(name, ())
            if max(_median(first), _median(second)) >= self.least:
                rows.append(self.row(name, group, "s", first, second))
        return rows

    def row(
        self,
        name: str,
        group: str,
        unit: str,
        before: Sequence[float],
        after: Sequence[float],
        *,
        by_mean: bool = False,
    ) -> Difference:
        """Return the row of one value, tested if there are enough steps."""
        if min(len(before), len(after)) < FEWEST:
            verdict = Verdict.FEW if before and after else Verdict.ALONE
            return _untested(name, group, unit, _median(before), _median(after), verdict)
        if len(self.pairs) >= 3 * PAIRED_BLOCKS and (len(before), len(after)) == self.counts:
            values = [(before[one], after[other]) for one, other in self.pairs]
            test = compare_pairs(values, mean_of_differences if by_mean else median)
        else:
            test = compare_series(before, after, mean_of_block if by_mean else median)
        untested = _untested(name, group, unit, test.before, test.after, Verdict.SAME)
        return replace(untested, test=test)


def _untested(name: str, group: str, unit: str, before: float, after: float, verdict: Verdict) -> Difference:
    return Difference(name=name, group=group, unit=unit, before=before, after=after, verdict=verdict)


def _drift_of_step(rows: Sequence[Difference]) -> float:
    """Return the drift of the step as a share; 0 if the step is not tested."""
    tests = [row.test for row in rows if row.name == "step" and row.test is not None]
    return tests[0].drift / tests[0].before if tests else 0.0


def _judged(rows: Sequence[Difference], step: float, drift: float) -> list[Difference]:
    """Return rows with corrected probabilities and verdicts; rows without a test stay as they are."""
    tests = [row.test for row in rows if row.test is not None]
    corrected = iter(holm([test.probability for test in tests]))
    judged = []
    for row in rows:
        if row.test is not None:
            probability = next(corrected)
            verdict = _verdict(row.test, probability, step if row.unit == "s" else 0.0, drift)
            row = replace(row, probability=probability, verdict=verdict)
        judged.append(row)
    return judged


def _verdict(test: Test, probability: float, step: float, drift: float) -> Verdict:
    is_small = abs(test.difference) < _SHARE_OF_STEP * step or not test.is_large()
    if probability >= LEVEL or is_small:
        return Verdict.SAME
    if not test.is_beyond_drift(drift):
        return Verdict.DRIFT
    return Verdict.HIGHER if test.difference > 0 else Verdict.LOWER


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
