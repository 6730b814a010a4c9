"""The Journal: a fast record of what played ranks did, made into spans only when someone looks.

The Breakdown of played steps, summed from the journal and not from spans.

A large table makes half a million spans, and few of them are ever looked at. The engine already knows what
`explain` would have to find out again: the reason of each wait, and when all participants had arrived. So
each rank and step is summed as follows:

    straggler wait          the part of each wait before all had arrived
    exposed communication   the part of each wait after that
    file wait               the file-wait spans
    bubble                  the bubble's spans, subtracted from the waits that contain them
    compute                 the rest: a played rank either computes or waits

The shares equal those of `shoal.spec.timeline.explain`, with one exception: of the ranks that communicate
within a block only one is played, so spans do not show who arrives late there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from shoal.predict.simulate.stage_pass import Collective, Exposed, Passage
from shoal.spec.timeline import Breakdown, CollectiveFigures, Kind, Lane, Parts, Purpose, RankBreakdown, Span
from shoal.spec.timeline.breakdown import mean, mean_by_operation


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


@dataclass(slots=True)
class _Figures:
    """Figures of one operation in one step of one rank; see `CollectiveFigures`."""

    count: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    transfer: float = 0.0

    def add(self, count: int, nbytes: float, seconds: float, transfer: float) -> None:
        self.count += count
        self.bytes += nbytes
        self.seconds += seconds
        self.transfer += transfer


@dataclass(slots=True)
class _Step:
    """The sums of one step of one rank."""

    begin: float
    end: float
    exposed: float = 0.0
    straggler: float = 0.0
    bubble: float = 0.0
    files: float = 0.0
    moments: list[tuple[float, float]] = field(default_factory=list)
    """Times in which any communication runs."""
    operations: dict[str, _Figures] = field(default_factory=dict)
    purposes: dict[Purpose, float] = field(default_factory=lambda: dict.fromkeys(Purpose, 0.0))
    """Exposed seconds, by purpose."""

    def figures(self, name: str) -> _Figures:
        """Return the figures of the operation that a span's name begins with."""
        return self.operations.setdefault(name.partition(":")[0], _Figures())

    def expose(self, name: str, purpose: Purpose, seconds: float) -> None:
        """Note that compute waits for the communication with this name."""
        self.exposed += seconds
        self.figures(name).exposed += seconds
        self.purposes[purpose] += seconds

    def parts(self, pace: float) -> Parts:
        wall = pace * (self.end - self.begin)
        waits = self.exposed, self.straggler, self.bubble, self.files
        exposed, straggler, bubble, files = (pace * each for each in waits)
        blocked = exposed + straggler + bubble
        communication = pace * _covered(self.moments, self.begin, self.end)
        return Parts(
            compute=wall - blocked - files,
            exposed_communication=exposed,
            bubble=bubble,
            data_wait=0.0,
            file_wait=files or None,
            straggler_wait=straggler,
            other=0.0,
            wall=wall,
            communication=communication,
            overlapped_communication=max(0.0, communication - blocked),
            bytes=sum(each.bytes for each in self.operations.values()),
        )

    def collectives(self, pace: float) -> dict[str, CollectiveFigures]:
        return {
            operation: CollectiveFigures(
                count=each.count,
                bytes=each.bytes,
                seconds=pace * each.seconds,
                exposed_seconds=pace * each.exposed,
                transfer_seconds=pace * each.transfer,
            )
            for operation, each in self.operations.items()
        }


class _Rank:
    """The steps of one rank."""

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        self.steps = [_Step(*each) for each in steps]
        self._begins = [begin for begin, _ in steps]
        self.waits: list[Waited] = []
        self.bubbles: list[tuple[float, float]] = []

    def index_at(self, time: float) -> int:
        """Return the index of the step in which something starts."""
        return max(0, bisect_right(self._begins, time) - 1)

    def at(self, time: float) -> _Step:
        """Return the step in which something starts at this time."""
        return self.steps[self.index_at(time)]


@dataclass(frozen=True, slots=True)
class Account:
    """The summed times of played steps.

    Attributes:
        breakdown: Where the time went; every step counts.
        exposed: By rank and by purpose, the exposed communication of a step in seconds.
    """

    breakdown: Breakdown
    exposed: Mapping[int, Mapping[str, float]]


def account_of(
    journal: Journal, bubbles: Iterable[Span], pace: float = 1.0, numbers: Mapping[int, int] | None = None
) -> Account:
    """Sum up the journal of played steps.

    Args:
        journal: The journal of the steps.
        bubbles: The bubble spans of the steps; those of one rank in order of time.
        pace: A factor on all times that the journal holds.
        numbers: How many ranks each played rank stands for in means; as many as any other if it is not named.
    """
    ranks = _ranks_of(journal)
    _add_passages(journal, ranks)
    for each in journal.communications:
        step = ranks[each.rank].at(each.start)
        step.moments.append((each.start, each.stop))
        step.figures(each.name).add(1, each.bytes, each.stop - each.start, each.stop - each.together)
    for work in journal.works:
        if work.kind == Kind.FILE_WAIT:
            ranks[work.rank].at(work.start).files += work.stop - work.start
    for waited in journal.waits:
        ranks[waited.rank].waits.append(waited)
    for bubble in bubbles:
        ranks[bubble.rank].bubbles.append((bubble.start, bubble.stop))
    for rank in ranks.values():
        _add_waits(rank)
    exposed = {number: _exposed_seconds(rank, pace) for number, rank in ranks.items()}
    return Account(_breakdown(ranks, pace, numbers or {}), exposed)


def _ranks_of(journal: Journal) -> dict[int, _Rank]:
    windows: dict[int, list[tuple[float, float]]] = {}
    for rank, kind, _, start, stop in journal.works:
        if kind == Kind.STEP:
            windows.setdefault(rank, []).append((start, stop))
    return {rank: _Rank(steps) for rank, steps in sorted(windows.items())}


def _add_passages(journal: Journal, ranks: dict[int, _Rank]) -> None:
    """Add the waits within forwards and backwards; there are few kinds of passages, and many of each kind."""
    passages = dict.fromkeys(each.passage for each in journal.passages)
    moments = {passage: tuple(passage.exposed_moments()) for passage in passages}
    times: Counter[tuple[int, int, Passage]] = Counter()
    for each in journal.passages:
        rank = ranks[each.rank]
        index = rank.index_at(each.start)
        rank.steps[index].moments += [
            (each.start + begin, each.start + end) for begin, end in moments[each.passage]
        ]
        times[each.rank, index, each.passage] += 1
    for (number, index, passage), count in times.items():
        step = ranks[number].steps[index]
        for collective in passage.exposed:
            seconds, late = count * collective.seconds, count * collective.late
            figures = step.figures(collective.name)
            figures.add(count, count * collective.bytes, seconds, seconds - late)
            step.straggler += late
            step.expose(collective.name, collective.purpose, seconds - late)


def _add_waits(rank: _Rank) -> None:
    """Add the waits between passages: bubble, straggler wait and exposed communication."""
    for waited, start, stop, is_bubble in _cut(rank.waits, rank.bubbles):
        step = rank.at(waited.start)
        if is_bubble:
            step.bubble += stop - start
            continue
        late = min(max(waited.together - start, 0.0), stop - start)
        step.straggler += late
        step.expose(waited.name, waited.purpose, stop - start - late)


def _cut(
    waits: Sequence[Waited], bubbles: Sequence[tuple[float, float]]
) -> Iterator[tuple[Waited, float, float, bool]]:
    """Cut each wait into parts inside and outside the bubbles; both lists are in order of time."""
    first = 0
    for waited in waits:
        now, stop = waited.start, waited.stop
        while first < len(bubbles) and bubbles[first][1] <= now:
            first += 1
        for at in range(first, len(bubbles)):
            begin, end = bubbles[at]
            if begin >= stop:
                break
            if begin > now:
                yield waited, now, begin, False
            yield waited, max(now, begin), min(end, stop), True
            now = min(end, stop)
        if now < stop:
            yield waited, now, stop, False


def _covered(moments: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds of a step that these moments cover."""
    total, reached = 0.0, begin
    for start, stop in sorted(moments):
        last = min(stop, end)
        if last > reached:
            total += last - max(start, reached)
            reached = last
    return total


def _exposed_seconds(rank: _Rank, pace: float) -> dict[str, float]:
    return {purpose: pace * fmean(step.purposes[purpose] for step in rank.steps) for purpose in Purpose}


def _breakdown(ranks: dict[int, _Rank], pace: float, numbers: Mapping[int, int]) -> Breakdown:
    told = []
    for number, rank in ranks.items():
        parts = {index: step.parts(pace) for index, step in enumerate(rank.steps)}
        told.append(
            RankBreakdown(
                rank=number,
                steps=parts,
                counted=tuple(parts),
                parts=mean(list(parts.values())),
                collectives=mean_by_operation([step.collectives(pace) for step in rank.steps]),
            )
        )
    every = [each for each in told for _ in range(numbers.get(each.rank, 1))]
    return Breakdown(
        ranks=tuple(told),
        parts=mean([each.parts for each in every]),
        collectives=mean_by_operation([each.collectives for each in every]),
    )
