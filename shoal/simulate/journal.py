"""The Journal: what played ranks did, written quickly, and made into spans when someone looks."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.simulate.passage import Collective, Exposed, Passage
from shoal.timeline import Kind, Lane, Span

__all__ = ["Journal"]


class Journal:
    """Collects what ranks do. Planning looks at the end of a step only, so spans are made by `spans`."""

    def __init__(self) -> None:
        self._passages: list[tuple[int, str, str, float, Passage]] = []
        self._compute: list[tuple[int, str, str, float, float]] = []
        self._communication: list[tuple[int, float, float, str, int, tuple[int, ...]]] = []

    def passage(self, rank: int, kind: str, name: str, start: float, passage: Passage) -> None:
        """A forward or backward beside which nothing travelled."""
        self._passages.append((rank, kind, name, start, passage))

    def work(self, rank: int, kind: str, name: str, start: float, stop: float) -> None:
        """A span of the compute lane."""
        self._compute.append((rank, kind, name, start, stop))

    def collective(self, rank: int, start: float, stop: float, collective: Collective) -> None:
        """A span of the communication lane."""
        self.message(rank, start, stop, collective.name, collective.bytes, collective.group)

    def message(
        self, rank: int, start: float, stop: float, name: str, nbytes: int, group: tuple[int, ...]
    ) -> None:
        """The same, of what is not a Collective."""
        self._communication.append((rank, start, stop, name, nbytes, group))

    def exposed(self, rank: int, start: float, collective: Collective) -> float:
        """A communication that compute waits for, in both lanes; gives its end."""
        stop = start + collective.seconds
        self.collective(rank, start, stop, collective)
        self.work(rank, Kind.WAIT, collective.name, start, stop)
        return stop

    def spans(self) -> Iterator[Span]:
        """All spans, in no order."""
        for rank, kind, name, start, stop in self._compute:
            yield Span(rank, Lane.COMPUTE, kind, name, start, stop - start)
        for rank, start, stop, name, nbytes, group in self._communication:
            yield Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, name, start, stop - start, nbytes, group)
        for rank, kind, name, start, passage in self._passages:
            yield Span(rank, Lane.COMPUTE, kind, name, start, passage.seconds)
            now = start
            for piece in passage.pieces:
                if isinstance(piece, float):
                    now += piece
                elif isinstance(piece, Exposed):
                    yield from _exposed(rank, now, piece.collective)
                    now += piece.collective.seconds


def _exposed(rank: int, start: float, each: Collective) -> Iterator[Span]:
    """In both lanes."""
    lane, kind = Lane.COMMUNICATION, Kind.COLLECTIVE
    yield Span(rank, lane, kind, each.name, start, each.seconds, each.bytes, each.group)
    yield Span(rank, Lane.COMPUTE, Kind.WAIT, each.name, start, each.seconds)
