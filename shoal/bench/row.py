"""The measurements of one contestant, in one collective at one size."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.bench.collective import COLLECTIVES


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The turns of one contestant.

    Attributes:
        collective: Name of the collective.
        backend: Name of the contestant.
        ranks: Number of ranks.
        bytes: Bytes of the whole; 0 for a barrier.
        count: Elements of the whole.
        dtype: Name of the element type.
        op: Name of the operator; None where nothing is reduced.
        iterations: Operations in a turn.
        seconds: Seconds of one operation, by round; empty if there was a problem.
        wrong: Number of wrong elements over all ranks; None if nothing was checked.
        problem: Reason why the contestant does not do this; None if it does.
        fresh: Whether each operation used new tensors; otherwise all used the same tensors.
    """

    collective: str
    backend: str
    ranks: int
    bytes: int
    count: int
    dtype: str
    op: str | None
    iterations: int
    seconds: tuple[float, ...]
    wrong: int | None
    problem: str | None
    fresh: bool = False

    @property
    def median(self) -> float:
        """Seconds of one operation, in the median round."""
        return median(self.seconds)

    @property
    def algbw(self) -> float:
        """Bytes a second: the size over the time."""
        return self.bytes / self.median

    @property
    def busbw(self) -> float:
        """Bytes a second over the busiest link, whatever the algorithm: algbw times the bus factor."""
        return self.algbw * COLLECTIVES[self.collective].bus_factor(self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The row for JSON: times in seconds, rates in bytes a second."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        if self.seconds:
            fields |= {"median": self.median, "algbw": self.algbw, "busbw": self.busbw}
        return fields


def ratio(row: Row, to: Row) -> float | None:
    """Return a row's time over another's: the median of the ratios in each round.

    Ratios are taken in each round, because the state of the machine at one moment affects both rows equally.
    None if one row has no times.
    """
    if not row.seconds or not to.seconds:
        return None
    return median(own / other for own, other in zip(row.seconds, to.seconds, strict=True))
