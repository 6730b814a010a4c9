"""The Journal: a fast record of what played ranks did, made into spans only when someone looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shoal.simulate.passage import Collective, Exposed, Passage
from shoal.timeline import Kind, Lane, Purpose, Span


class Passed(NamedTuple):
    """A forward or backward during which no communication travelled beside compute.

    Attributes:
        rank: Global rank.
        kind: Kind of the span.
        name: Name of the span.
        start: When it began; it takes the passage's seconds.
        passage: The passage that was played.
    """

    rank: int
    kind: str
    name: str
    start: float
    passage: Passage


class Worked(NamedTuple):
    """A span of the compute lane, from `start` to `stop`."""

    rank: int
    kind: str
    name: str
    start: float
    stop: float


class Waited(NamedTuple):
    """A time in which a rank's compute stood still.

    Attributes:
        rank: Global rank.
        name: Name of the communication that it waited for.
        purpose: Purpose of that communication.
        start: When it began to wait.
        together: When the last participant had arrived; until then, the rank waits for a straggler.
        stop: When it went on.
    """

    rank: int
    name: str
    purpose: Purpose
    start: float
    together: float
    stop: float


class Communicated(NamedTuple):
    """A span of the communication lane.

    Attributes:
        rank: Global rank.
        start: When the rank began it.
        together: When all participants had begun it.
        stop: When it ended.
        name: Name of the span.
        bytes: Bytes of the tensor.
        group: Global ranks of the participants.
        purpose: Purpose of the communication.
    """

    rank: int
    start: float
    together: float
    stop: float
    name: str
    bytes: int
    group: tuple[int, ...]
    purpose: Purpose


class Journal:
    """Collect what ranks do. Planning needs only the end of a step, so spans are made later, by `spans`."""

    def __init__(self) -> None:
        self.passages: list[Passed] = []
        self.works: list[Worked] = []
        self.waits: list[Waited] = []
        self.communications: list[Communicated] = []

    def passage(self, rank: int, kind: str, name: str, start: float, passage: Passage) -> None:
        """Note a forward or backward during which no communication travelled beside compute."""
        self.passages.append(Passed(rank, kind, name, start, passage))

    def work(self, rank: int, kind: str, name: str, start: float, stop: float) -> None:
        """Note a span of the compute lane."""
        self.works.append(Worked(rank, kind, name, start, stop))

    def wait(
        self, rank: int, name: str, purpose: Purpose, start: float, together: float, stop: float
    ) -> None:
        """Note that compute stood still."""
        self.waits.append(Waited(rank, name, purpose, start, together, stop))

    def collective(
        self, rank: int, start: float, together: float, stop: float, collective: Collective
    ) -> None:
        """Note a span of the communication lane."""
        self.communications.append(
            Communicated(
                rank,
                start,
                together,
                stop,
                collective.name,
                collective.bytes,
                collective.group,
                collective.purpose,
            )
        )

    def message(
        self,
        rank: int,
        start: float,
        together: float,
        stop: float,
        name: str,
        nbytes: int,
        group: tuple[int, ...],
    ) -> None:
        """Note a message between stages; each end of it is a span of the communication lane."""
        self.communications.append(
            Communicated(rank, start, together, stop, name, nbytes, group, Purpose.PIPELINE)
        )

    def exposed(self, rank: int, start: float, collective: Collective) -> float:
        """Note a communication that compute waits for, in both lanes; return its end."""
        together, stop = start + collective.late, start + collective.seconds
        self.collective(rank, start, together, stop, collective)
        self.wait(rank, collective.name, collective.purpose, start, together, stop)
        return stop

    def busy(self) -> Iterator[tuple[float, float]]:
        """Yield the times in which ranks work: forwards, backwards and the optimizer, with their waits."""
        for passed in self.passages:
            yield passed.start, passed.start + passed.passage.seconds
        for worked in self.works:
            if worked.kind != Kind.STEP:
                yield worked.start, worked.stop

    def spans(self) -> Iterator[Span]:
        """Yield all spans, in no order."""
        for rank, kind, name, start, stop in self.works:
            yield Span(rank, Lane.COMPUTE, kind, name, start, stop - start)
        for rank, name, purpose, start, _, stop in self.waits:
            yield _wait(rank, name, start, stop - start, purpose)
        for rank, start, _, stop, name, nbytes, group, purpose in self.communications:
            yield _communication(rank, name, start, stop - start, nbytes, group, purpose)
        for rank, kind, name, start, passage in self.passages:
            yield Span(rank, Lane.COMPUTE, kind, name, start, passage.seconds)
            now = start
            for piece in passage.pieces:
                if isinstance(piece, float):
                    now += piece
                elif isinstance(piece, Exposed):
                    yield from _exposed(rank, now, piece.collective)
                    now += piece.collective.seconds


def _exposed(rank: int, start: float, each: Collective) -> Iterator[Span]:
    """Yield the spans of an exposed communication, in both lanes."""
    yield _communication(rank, each.name, start, each.seconds, each.bytes, each.group, each.purpose)
    yield _wait(rank, each.name, start, each.seconds, each.purpose)


def _communication(
    rank: int, name: str, start: float, seconds: float, nbytes: int, group: tuple[int, ...], purpose: Purpose
) -> Span:
    kind, lane = Kind.COLLECTIVE, Lane.COMMUNICATION
    return Span(rank, lane, kind, name, start, seconds, nbytes, group, purpose=purpose)


def _wait(rank: int, name: str, start: float, seconds: float, purpose: Purpose) -> Span:
    return Span(rank, Lane.COMPUTE, Kind.WAIT, name, start, seconds, purpose=purpose)
