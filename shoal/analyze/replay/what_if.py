"""What if: the seconds of a step without a slow rank, a slow stage, a link, a wait or a kind of work.

The graph of a measured Timeline.

On each rank, work is the time between its collectives in which the rank is not blocked. A wait belongs to the
last collective of its name. What is left of a wait after its collective has ended is work of kind "wait": the
rank had to wake up. A collective of which spans are missing belongs to the rank alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.analyze.replay.graph import (
    Arrive,
    Await,
    Collective,
    Event,
    Graph,
    OnPath,
    Played,
    Work,
    as_ideal,
    as_others,
    critical_path,
    play,
    stage_of,
    transfers_as_others,
    without_transfers,
    without_waits,
    without_work,
)
from shoal.errors import ShoalError
from shoal.spec.timeline import Kind, Lane, Meeting, Span, Timeline, meetings
from shoal.spec.timeline.intervals import Interval, StepWindows

_WORKS = (
    *(Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.DATA_WAIT, Kind.COPY),
    *(Kind.VALIDATION, Kind.CHECKPOINT),
)
_MOST_STEPS = 200
"""Steps in graphs at most: a graph needs memory for each of its spans."""


def graph_of(timeline: Timeline, steps: Sequence[int] | None = None) -> Graph:
    """Return the graph of the longest row of steps that follow one another.

    Args:
        timeline: The measured timeline.
        steps: Steps to choose from; by default all that all ranks finished, without the first two.

    Raises:
        ShoalError: No step was finished by all ranks.
    """
    return max(graphs_of(timeline, steps), key=lambda graph: len(graph.steps))


def graphs_of(timeline: Timeline, steps: Sequence[int] | None = None) -> list[Graph]:
    """Return a graph for each row of steps that follow one another, up to the last 200 steps.

    The arguments and the error are those of `graph_of`.
    """
    windows = {rank: found for rank in timeline.ranks if (found := StepWindows(timeline, rank))}
    rows = _rows(windows, steps)
    if not rows:
        raise ShoalError("the timeline holds no step that all ranks finished, so there is nothing to replay")
    met: dict[int, list[Meeting]] = {}
    for each in meetings(timeline, windows):
        met.setdefault(each.step, []).append(each)
    return [
        _graph(timeline, windows, row, [each for step in row for each in met.get(step, ())]) for row in rows
    ]


def _graph(
    timeline: Timeline, windows: Mapping[int, StepWindows], row: Sequence[int], met: Sequence[Meeting]
) -> Graph:
    collectives, numbers = _collectives(met)
    programs: dict[int, Sequence[Event]] = {}
    starts: dict[int, float] = {}
    for rank, found in windows.items():
        window = found[row[0]][0], found[row[-1]][1]
        inside = [span for span in timeline.of(rank) if span.stop > window[0] and span.start < window[1]]
        programs[rank] = _program(rank, window, inside, found, collectives, numbers)
        starts[rank] = window[0]
    return Graph(programs=programs, starts=starts, collectives=collectives, steps=tuple(row))


def _rows(windows: Mapping[int, StepWindows], steps: Sequence[int] | None) -> list[list[int]]:
    """Return the rows of steps without a gap that all ranks finished one after another."""
    if not windows:
        return []
    common = sorted(set.intersection(*(set(found) for found in windows.values())))
    if steps is not None:
        chosen = set(steps)
        common = [step for step in common if step in chosen]
    elif len(common) > 3:
        common = common[2:]
    common = common[-_MOST_STEPS:]
    rows: list[list[int]] = []
    for step in common:
        follows = rows and rows[-1][-1] == step - 1
        if follows and all(found[step - 1][1] <= found[step][0] for found in windows.values()):
            rows[-1].append(step)
        else:
            rows.append([step])
    return rows


_Spans = dict[tuple[int, int], int]
"""By rank and `id` of a span, the number of its collective."""


def _collectives(met: Iterable[Meeting]) -> tuple[list[Collective], _Spans]:
    """Return the collectives in the order in which they ended, and the number of each span's."""
    parts: list[tuple[Meeting, Mapping[int, Span]]] = []
    for meeting in met:
        if meeting.is_whole:
            parts.append((meeting, meeting.spans))
        else:
            parts.extend((meeting, {rank: span}) for rank, span in meeting.spans.items())
    parts.sort(key=lambda part: max(span.stop for span in part[1].values()))
    collectives: list[Collective] = []
    numbers: _Spans = {}
    ended: dict[tuple[int, ...], tuple[int, float]] = {}
    for meeting, spans in parts:
        begin = max(span.start for span in spans.values())
        group = tuple(spans) if len(spans) == 1 else meeting.group
        after, before = ended.get(group, (None, begin))
        begin = max(begin, before)
        number = len(collectives)
        span = next(iter(spans.values()))
        seconds = {rank: max(each.stop - begin, 0.0) for rank, each in spans.items()}
        collectives.append(
            Collective(meeting.name, span.purpose, meeting.step, span.bytes, group, seconds, after)
        )
        for rank, each in spans.items():
            numbers[rank, id(each)] = number
        ended[group] = number, max(each.stop for each in spans.values())
    return collectives, numbers


@dataclass(slots=True)
class _Rank:
    """The program of a rank while it is made.

    Attributes:
        pieces: The spans of its work, by start.
        windows: Its steps.
        row: The indices of the steps.
        now: The time up to which the program is made.
        events: The events up to then.
    """

    pieces: Sequence[Span]
    starts: Sequence[float]
    row: Sequence[tuple[float, int]]
    now: float
    events: list[Event] = field(default_factory=list)

    def work_until(self, stop: float) -> None:
        """Append the work until a time, span by span."""
        while self.now < stop:
            position = bisect_right(self.starts, self.now) - 1
            kind, name, until = str(Kind.OTHER), "", stop
            if position >= 0 and self.pieces[position].stop > self.now:
                kind, name = self.pieces[position].kind, self.pieces[position].name
                until = min(stop, self.pieces[position].stop)
            if position + 1 < len(self.starts):
                until = min(until, self.starts[position + 1])
            self.append_work(kind, name, until - self.now)
            self.now = until

    def append_work(self, kind: str, name: str, seconds: float) -> None:
        """Append work at the present time."""
        at = bisect_right(self.row, self.now, key=lambda each: each[0]) - 1
        self.events.append(Work(kind, name, self.row[max(at, 0)][1], seconds))


def _program(
    rank: int,
    window: Interval,
    spans: Sequence[Span],
    windows: StepWindows,
    collectives: list[Collective],
    numbers: _Spans,
) -> list[Event]:
    """Return the events of a rank; end collectives no later than the waits for them."""
    pieces = [span for span in spans if span.lane == Lane.COMPUTE and span.kind in _WORKS]
    row = [(start, index) for index, (start, _) in windows.items() if window[0] <= start < window[1]]
    made = _Rank(pieces, [span.start for span in pieces], row, window[0])
    arrived: dict[str, tuple[int, Span]] = {}
    for moment, is_wait, span in _moments(spans, rank, numbers, window):
        made.work_until(min(moment, window[1]))
        if not is_wait:
            number = numbers[rank, id(span)]
            made.events.append(Arrive(number))
            arrived[span.name] = number, span
            if span.lane != Lane.COMPUTE:
                continue
        if span.name not in arrived:
            made.append_work(str(Kind.WAIT), span.name, max(span.stop - made.now, 0.0))
        else:
            number, collective = arrived[span.name]
            made.events.append(Await(number))
            ended = min(max(collective.stop, span.start), span.stop)
            if collective.stop > span.stop:
                _end_by(collectives, number, rank, collective.stop - span.stop)
            made.append_work(str(Kind.WAIT), span.name, max(span.stop - max(ended, made.now), 0.0))
        made.now = max(made.now, span.stop)
    made.work_until(window[1])
    return made.events


def _moments(
    spans: Iterable[Span], rank: int, numbers: _Spans, window: Interval
) -> list[tuple[float, bool, Span]]:
    """Return arrivals and waits by time; an arrival within a wait comes before it."""
    waits = [span for span in spans if span.kind == Kind.WAIT and span.lane == Lane.COMPUTE]
    found = [(span.start, True, span) for span in waits if window[0] <= span.start < window[1]]
    starts = [span.start for span in waits]
    for span in spans:
        if span.kind == Kind.COLLECTIVE and (rank, id(span)) in numbers:
            position = bisect_right(starts, span.start) - 1
            within = position >= 0 and waits[position].stop > span.start
            found.append((waits[position].start if within else span.start, False, span))
    return sorted(found, key=lambda each: (each[0], each[1]))


def _end_by(collectives: list[Collective], number: int, rank: int, earlier: float) -> None:
    """Let a collective end earlier on a rank: the rank went on before the end was noted."""
    each = collectives[number]
    seconds = {**each.seconds, rank: max(each.seconds[rank] - earlier, 0.0)}
    collectives[number] = replace(each, seconds=seconds)


_KINDS = (Kind.DATA_WAIT, Kind.COPY, Kind.OPTIMIZER, Kind.OTHER)
_MOST_WAITS = 10
_MOST_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class Saving:
    """A change, and what it would save.

    Attributes:
        kind: Kind of the change: "rank", "stage", "link", "network", "wait" or "work".
        what: What would be different, as a phrase.
        seconds: Seconds of a step that it would save.
    """

    kind: str
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What steps would take without this and that.

    Attributes:
        steps: The steps that were replayed.
        seconds: Seconds of a step, as measured.
        replayed: Seconds of a step in the replay without a change: how exact the replay is.
        ideal: Seconds of a step if all work and all transfers took what they take on average.
        savings: The changes, the most worth first.
        path: The critical path, the largest part first; seconds are of a step.
    """

    steps: tuple[int, ...]
    seconds: float
    replayed: float
    ideal: float
    savings: tuple[Saving, ...]
    path: tuple[OnPath, ...]

    @property
    def slowdown(self) -> float:
        """Return the measured seconds over the ideal ones."""
        return self.replayed / self.ideal


def what_if(timeline: Timeline, steps: Sequence[int] | None = None) -> WhatIf:
    """Replay steps of a measured timeline with changes.

    Args:
        timeline: The measured timeline.
        steps: Steps to choose from; see `graphs_of`.

    Raises:
        ShoalError: No step was finished by all ranks.
    """
    graphs = _few_enough(graphs_of(timeline, steps))
    played = [play(graph) for graph in graphs]
    count = sum(len(graph.steps) for graph in graphs)
    replayed = sum(each.seconds for each in played)
    saved: dict[tuple[str, str], float] = {}
    parts: dict[tuple[int | None, tuple[int, ...], str], float] = {}
    names = _waited_most(played)
    for graph, each in zip(graphs, played, strict=True):
        for kind, what, changed in _changes(graph, names):
            saved[kind, what] = saved.get((kind, what), 0.0) + each.seconds - play(changed).seconds
        for part in critical_path(each):
            key = part.rank, part.group, part.what
            parts[key] = parts.get(key, 0.0) + part.seconds
    savings = [Saving(kind, what, seconds / count) for (kind, what), seconds in saved.items()]
    path = [OnPath(*key, seconds / count) for key, seconds in parts.items()]
    return WhatIf(
        steps=tuple(step for graph in graphs for step in graph.steps),
        seconds=sum(_measured_seconds(timeline, graph) for graph in graphs) / count,
        replayed=replayed / count,
        ideal=sum(play(as_ideal(graph)).seconds for graph in graphs) / count,
        savings=tuple(sorted(savings, key=lambda saving: -saving.seconds)),
        path=tuple(sorted(path, key=lambda part: -part.seconds)),
    )


def _few_enough(graphs: Sequence[Graph]) -> list[Graph]:
    """Return the last graphs, as many as can be played many times in a short time; at least one."""
    chosen: list[Graph] = []
    events = 0
    for graph in reversed(graphs):
        events += sum(map(len, graph.programs.values()))
        if chosen and events > _MOST_EVENTS:
            break
        chosen.append(graph)
    return chosen[::-1]


def _measured_seconds(timeline: Timeline, graph: Graph) -> float:
    ends = [timeline.step(rank, graph.steps[-1]) for rank in graph.programs]
    return max(span.stop for span in ends if span is not None) - min(graph.starts.values())


def _changes(graph: Graph, names: Sequence[str]) -> Iterator[tuple[str, str, Graph]]:
    """Yield each change: its kind, what is different, and the graph with it."""
    if len(graph.programs) > 1:
        for rank in graph.programs:
            yield "rank", f"rank {rank} works as its peers do", as_others(graph, [rank])
    stages = _stages(graph)
    if len(stages) > 1:
        for stage, ranks in stages.items():
            yield "stage", f"stage {stage} works as the other stages do", as_others(graph, ranks)
    groups = sorted({each.group for each in graph.collectives if len(each.group) > 1})
    for group in groups if len(groups) > 1 else ():
        named = f"{_named(group)} are as quick as other groups"
        yield "link", f"transfers among {named}", transfers_as_others(graph, [group])
    yield "network", "all transfers take no time", without_transfers(graph)
    for name in names:
        yield "wait", f"nobody waits for {name}", without_waits(graph, [name])
    present = {
        event.kind for program in graph.programs.values() for event in program if isinstance(event, Work)
    }
    for kind in _KINDS:
        if kind in present:
            yield "work", f"no {kind.replace('_', ' ')}", without_work(graph, [kind])


def _stages(graph: Graph) -> dict[int, list[int]]:
    """Return the ranks of each stage, for ranks that have one stage."""
    stages: dict[int, list[int]] = {}
    for rank, program in graph.programs.items():
        found = {stage_of(event) for event in program if isinstance(event, Work)} - {None}
        if len(found) == 1:
            (stage,) = found
            if stage is not None:
                stages.setdefault(stage, []).append(rank)
    return dict(sorted(stages.items()))


def _waited_most(played: Sequence[Played]) -> list[str]:
    """Return the names of the collectives that ranks waited for longest."""
    waited: dict[str, float] = {}
    for each in played:
        for rank, program in each.graph.programs.items():
            before = each.graph.starts[rank]
            for event, stop in zip(program, each.stops[rank], strict=True):
                if not isinstance(event, Work) and stop > before:
                    name = each.graph.collectives[event.collective].name
                    waited[name] = waited.get(name, 0.0) + stop - before
                before = stop
    return sorted(waited, key=lambda name: -waited[name])[:_MOST_WAITS]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"
