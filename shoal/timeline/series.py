"""The seconds of each step by kind of span and by collective, to compare two runs step by step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from shoal.timeline.breakdown import RankBreakdown, explain
from shoal.timeline.intervals import length
from shoal.timeline.kinds import PARTS, kinds_of_step
from shoal.timeline.matching import Arrival, match_collectives
from shoal.timeline.named_collectives import one_after_another
from shoal.timeline.span import Span
from shoal.timeline.timeline import Timeline
from shoal.timeline.windows import StepWindows

Series = dict[str, dict[int, float]]
"""Seconds by name and by index of a step."""


def kind_series(timeline: Timeline) -> Series:
    """Return the seconds of each step by kind, as means over the ranks.

    The kinds are those of `shoal.timeline.kinds`. Steps that not every rank finished are left out.

    Raises:
        ShoalError: No rank finished a step.
    """
    breakdown = explain(timeline)
    windows = {rank.rank: StepWindows(timeline, rank.rank) for rank in breakdown.ranks}
    arrivals = match_collectives(timeline, windows)
    return _means(
        [
            _of_rank(timeline.of(rank.rank), rank, windows[rank.rank], arrivals[rank.rank])
            for rank in breakdown.ranks
        ]
    )


def collective_series(timeline: Timeline) -> Series:
    """Return the seconds for which each collective is under way in each step, as means over the ranks.

    `shoal.timeline.named_collectives` says when a collective is under way. One that a step does not have
    counts as zero there.
    """
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    arrivals = match_collectives(timeline, windows)
    by_rank = []
    for rank, steps in windows.items():
        by_step: dict[int, list[Arrival]] = {index: [] for index in steps}
        for arrival in arrivals[rank]:
            by_step[arrival.step].append(arrival)
        names = {arrival.span.name for arrival in arrivals[rank]}
        found: Series = {name: dict.fromkeys(steps, 0.0) for name in sorted(names)}
        for index, of_step in by_step.items():
            for span, under_way in one_after_another(of_step):
                found[span.name][index] += length(under_way)
        by_rank.append(found)
    return _means(by_rank)


def step_starts(timeline: Timeline) -> dict[int, float]:
    """Return when each step that every rank finished began on the first rank: wall-clock seconds."""
    windows = [steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))]
    common = set.intersection(*map(set, windows)) if windows else set()
    return {step: timeline.origin_unix_ns / 1e9 + windows[0][step][0] for step in sorted(common)}


def _means(by_rank: Sequence[Series]) -> Series:
    """Return the means over the ranks that have a name, in the steps that each of them finished."""
    means: Series = {}
    for name in dict.fromkeys(name for series in by_rank for name in series):
        having = [series[name] for series in by_rank if name in series]
        steps = sorted(set.intersection(*(set(values) for values in having)))
        means[name] = {index: fmean(values[index] for values in having) for index in steps}
    return means


def _of_rank(
    spans: Sequence[Span], rank: RankBreakdown, windows: StepWindows, arrivals: Sequence[Arrival]
) -> Series:
    spans_in = windows.share_out((span, span) for span in spans)
    arrivals_in = windows.share_out((arrival.span, arrival) for arrival in arrivals)
    series: Series = {}
    for index in sorted(windows):
        of_step = kinds_of_step(windows[index], spans_in[index], arrivals_in[index])
        parts = rank.steps[index]
        of_step |= {name: getattr(parts, name) or 0.0 for name in PARTS} | {"step": parts.wall}
        for name, seconds in of_step.items():
            series.setdefault(name, {})[index] = seconds
    return series
