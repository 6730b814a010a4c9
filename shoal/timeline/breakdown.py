"""The Breakdown: where the time went, for each step, each rank and over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.timeline.launch import own_seconds
from shoal.timeline.matching import Arrival, match_collectives
from shoal.timeline.parts import CollectiveFigures, Parts, mean, mean_by_operation
from shoal.timeline.span import Span
from shoal.timeline.step import explain_step
from shoal.timeline.timeline import Timeline
from shoal.timeline.windows import StepWindows

_WARM_UP_STEPS = 2
_FEWEST_STEPS_AFTER_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBreakdown:
    """Where the time of one rank's steps went.

    Attributes:
        rank: The global rank.
        steps: The parts of each of its steps, by index.
        counted: The indices that the averages count, ascending; see `explain`.
        parts: The average over the counted steps.
        collectives: The average over the counted steps, by operation.
    """

    rank: int
    steps: Mapping[int, Parts]
    counted: tuple[int, ...]
    parts: Parts
    collectives: Mapping[str, CollectiveFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of all ranks' steps went.

    Attributes:
        ranks: Each rank that finished a step, ascending.
        parts: The mean over the ranks.
        collectives: The mean over the ranks, by operation: the part of a span's name before the colon.
    """

    ranks: tuple[RankBreakdown, ...]
    parts: Parts
    collectives: Mapping[str, CollectiveFigures]

    def of(self, rank: int) -> RankBreakdown:
        """Return the breakdown of one rank.

        Raises:
            KeyError: The rank finished no step.
        """
        for each in self.ranks:
            if each.rank == rank:
                return each
        raise KeyError(rank)


def explain(timeline: Timeline) -> Breakdown:
    """Return where the time went; `shoal.timeline.step` defines the parts.

    The average of a rank leaves out its first two steps, which warm up, if three or more remain. Of these it
    takes the mean over the middle half by wall time. Like a median this ignores outliers. Unlike medians of
    each part, the parts still sum to the wall time.

    Raises:
        ShoalError: No rank finished a step.
    """
    windows = {rank: steps for rank in timeline.ranks if (steps := StepWindows(timeline, rank))}
    if not windows:
        raise ShoalError("the timeline holds no finished step, so there is nothing to explain")
    arrivals = match_collectives(timeline, windows)
    ranks = tuple(
        _explain_rank(rank, steps, timeline.of(rank), arrivals[rank]) for rank, steps in windows.items()
    )
    return Breakdown(
        ranks=ranks,
        parts=mean([rank.parts for rank in ranks]),
        collectives=mean_by_operation([rank.collectives for rank in ranks]),
    )


def _explain_rank(
    rank: int, windows: StepWindows, spans: Sequence[Span], arrivals: Sequence[Arrival]
) -> RankBreakdown:
    spans_in = windows.share_out((span, span) for span in spans)
    arrivals_in = windows.share_out((arrival.span, arrival) for arrival in arrivals)
    own = own_seconds(spans)
    figures = {
        index: explain_step(windows[index], spans_in[index], arrivals_in[index], own)
        for index in sorted(windows)
    }
    steps = {index: parts for index, (parts, _) in figures.items()}
    counted = _typical_steps(steps)
    return RankBreakdown(
        rank=rank,
        steps=steps,
        counted=counted,
        parts=mean([steps[index] for index in counted]),
        collectives=mean_by_operation([figures[index][1] for index in counted]),
    )


def _typical_steps(steps: Mapping[int, Parts]) -> tuple[int, ...]:
    """Return the middle half, by wall time, of the steps after warm-up, ascending."""
    indices = sorted(steps)
    if len(indices) >= _WARM_UP_STEPS + _FEWEST_STEPS_AFTER_WARM_UP:
        indices = indices[_WARM_UP_STEPS:]
    by_wall = sorted(indices, key=lambda index: steps[index].wall)
    quarter = len(by_wall) // 4
    return tuple(sorted(by_wall[quarter : len(by_wall) - quarter]))
