"""The collectives that the bench measures: their buffers and bus factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


class Extent(Enum):
    """The part of a collective's size that one buffer of one rank holds."""

    NONE = "none"
    PART = "part"
    """The share of one rank: the size divided by the ranks."""
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Its size is that of the whole, as in nccl-tests: the bytes that all ranks together contribute to a
    gather, or hold after a scatter; elsewhere the bytes that each rank holds.

    Attributes:
        name: Name in `torch.distributed`; `send_recv` sends to the next rank and receives from the previous.
        input: Extent of the buffer that a rank gives; NONE if the operation is in place, in `output`.
        output: Extent of the buffer that a rank gets.
        reduces: Whether values are combined, so that the operator matters.
        bus_factor: Function that gives, for a number of ranks, busbw over algbw: the share of the size that
            the busiest link must carry with any algorithm. With it, rates of different collectives and
            numbers of ranks can be compared with each other and with the link.
    """

    name: str
    input: Extent
    output: Extent
    reduces: bool
    bus_factor: Callable[[int], float]

    @property
    def divides(self) -> bool:
        """Whether the elements must divide evenly over the ranks."""
        return Extent.PART in (self.input, self.output) or self.name == "all_to_all"


def _both_ways(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _everything(ranks: int) -> float:
    return 1.0


_NONE, _PART, _WHOLE = Extent.NONE, Extent.PART, Extent.WHOLE

COLLECTIVES: Mapping[str, Collective] = {
    collective.name: collective
    for collective in (
        Collective("all_reduce", _NONE, _WHOLE, True, _both_ways),
        Collective("all_gather", _PART, _WHOLE, False, _all_but_own),
        Collective("reduce_scatter", _WHOLE, _PART, True, _all_but_own),
        Collective("all_to_all", _WHOLE, _WHOLE, False, _all_but_own),
        Collective("broadcast", _NONE, _WHOLE, False, _everything),
        Collective("reduce", _NONE, _WHOLE, True, _everything),
        Collective("gather", _PART, _WHOLE, False, _all_but_own),
        Collective("scatter", _WHOLE, _PART, False, _all_but_own),
        Collective("send_recv", _WHOLE, _WHOLE, False, _everything),
        Collective("barrier", _NONE, _NONE, False, _everything),
    )
}
"""Collectives by name, in the order of measurement. The root, where there is one, is rank 0."""
