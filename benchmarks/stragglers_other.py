"""The verdict on runs that a second generator draws, on which no threshold was chosen.

    python benchmarks/stragglers_other.py [--cases 200] [--windows 1000] [--noise 1]

It shares no code with `shoal.testing.delays`: other steps (gradient accumulation, sharded weights gathered
block by block, tensor parallelism, steps of 8 to 400 ms), and other noise. Each window draws several of:
heavy tails (Pareto), drift (a random walk of each rank's speed that comes back), noise that ranks of a host
share, a neighbour that takes a core now and then and hits another rank each time, a pause of every rank in
turn each 15 to 25 steps (of 4 % of a step in each part of forward: 16 or 48 % in all), ranks that differ a
little all the time, and steps that save. Delays are those of `stragglers.py`, with other periods and
lengths, in any phase, the whole machine, or a link.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stragglers import Score, table

from shoal.analyze.diagnosis import Cause, Pattern, Verdict, verdict
from shoal.spec.timeline import Kind, Lane, Purpose, Span, Timeline

__all__ = ["Drawn", "drawn_case"]

CAUSES = (
    *(Cause.LOADER, Cause.COPY, Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER, Cause.LINK),
    Cause.MACHINE,
)
_STEPS = 62
_SHARE = 0.10
_COMPUTE = (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER)


@dataclass(frozen=True)
class Drawn:
    """A window that was drawn, and what is wrong in it.

    Attributes:
        timeline: The window.
        rank: The late rank.
        cause: What is late.
        pattern: When.
        ranks: Number of ranks.
        tp: Ranks that split layers.
        what: Its shape and noise, in words.
    """

    timeline: Timeline
    rank: int
    cause: Cause
    pattern: Pattern
    ranks: int
    tp: int
    what: str


@dataclass
class _Noise:
    """The noise of a window: a factor and a pause for each rank, step and phase."""

    randomness: random.Random
    ranks: int
    forms: frozenset[str]
    host: int  # ranks of a host
    size: float = 1.0  # of all of it
    speed: list[float] = field(default_factory=list)
    shared: dict[int, float] = field(default_factory=dict)
    hit: int = -1

    def begin(self) -> None:
        """Draw what holds for a whole window."""
        spread = 0.008 * self.size if "differ" in self.forms else 0.0
        self.speed = [1 + self.randomness.gauss(0, spread) for _ in range(self.ranks)]
        self.offset = [self.randomness.randrange(20) for _ in range(self.ranks)]
        self.every = self.randomness.randint(15, 25)

    def step(self, index: int) -> None:
        """Draw what holds for a step."""
        draw = self.randomness
        if "drift" in self.forms:  # it comes back: a rank does not become slow for good
            self.speed = [1 + 0.97 * (each - 1) + draw.gauss(0, 0.003 * self.size) for each in self.speed]
        size = 0.04 * self.size if "host" in self.forms else 0.0
        self.shared = {host: draw.lognormvariate(0, size) for host in range(self.ranks)}
        self.hit = draw.randrange(self.ranks) if "neighbour" in self.forms and draw.random() < 0.12 else -1
        self.index = index

    def of(self, rank: int, cause: Cause, seconds: float, whole: float) -> float:
        """Return how long a phase takes that would take so many seconds of a step of `whole`."""
        draw = self.randomness
        found = (
            seconds
            * self.speed[rank]
            * self.shared[rank // self.host]
            * draw.lognormvariate(0, 0.02 * self.size)
        )
        if "tails" in self.forms and draw.random() < 0.05:
            found += seconds * min(0.05 * self.size * (draw.paretovariate(1.5) - 1), 1.5 * self.size)
        if rank == self.hit and cause in (Cause.FORWARD, Cause.BACKWARD):
            found += 0.15 * self.size * seconds * draw.random()
        if "pauses" in self.forms and cause == Cause.FORWARD:
            found += 0.04 * self.size * whole * ((self.index + self.offset[rank]) % self.every == 0)
        return found


class _Ranks:
    """Ranks that do the same operations in order; each operation is played for all of them at once."""

    def __init__(self, count: int) -> None:
        self.now = [0.0] * count
        self.spans: list[Span] = []
        self._free: dict[tuple[int, ...], float] = {}
        self._ends: dict[tuple[str, int], float] = {}

    def work(self, kind: str, name: str, seconds: Sequence[float]) -> None:
        for rank, each in enumerate(seconds):
            self.spans.append(Span(rank, Lane.COMPUTE, kind, name, self.now[rank], each))
            self.now[rank] += each

    def arrive(
        self, name: str, groups: Sequence[tuple[int, ...]], seconds: Callable[[tuple[int, ...]], float]
    ) -> None:
        for group in groups:
            begin = max(max(self.now[rank] for rank in group), self._free.get(group, 0.0))
            end = begin + seconds(group)
            self._free[group] = end
            for rank in group:
                stop = end + 1e-5 * (rank % 3)
                given = name, self.now[rank], stop - self.now[rank], 1 << 22, group
                self.spans.append(
                    Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, *given, purpose=Purpose.DATA)
                )
                self._ends[name, rank] = stop

    def wait(self, name: str) -> None:
        for rank, now in enumerate(self.now):
            stop = max(self._ends.get((name, rank), now), now)
            self.spans.append(
                Span(rank, Lane.COMPUTE, Kind.WAIT, name, now, stop - now, purpose=Purpose.DATA)
            )
            self.now[rank] = stop + 5e-6


def drawn_case(seed: int, cause: Cause | None, steps: int = _STEPS, size: float = 1.0) -> Drawn:
    """Return a window with a delay of this cause, or without any; `size` scales its noise."""
    draw = random.Random(seed)
    tp = draw.choice((1, 1, 2))
    ranks = draw.choice((2, 4, 8)) if tp == 1 else draw.choice((4, 8))
    if cause == Cause.LINK and tp == 1:  # a link of one group has no peers
        tp, ranks = 2, draw.choice((4, 8))
    shape = draw.choice(("accumulate", "gathered", "plain"))
    forms = frozenset(
        form
        for form in ("tails", "drift", "host", "neighbour", "pauses", "differ", "saves")
        if draw.random() < 0.4
    )
    whole = draw.choice((0.008, 0.03, 0.1, 0.4))
    patterns = [Pattern.PERSISTENT] * 2 + [Pattern.PERIODIC, Pattern.ONCE] * (cause != Cause.LINK)
    pattern, period = draw.choice(patterns), draw.randint(3, 8)
    first, length = draw.randrange(5, steps - 20), draw.randint(10, 18)
    is_late: dict[Pattern, Callable[[int], bool]] = {
        Pattern.PERSISTENT: lambda step: True,
        Pattern.PERIODIC: lambda step: step % period == 0,
        Pattern.ONCE: lambda step: first <= step < first + length,
    }
    rank = draw.randrange(ranks)
    share = _SHARE * (1.0 if pattern == Pattern.PERSISTENT else 4.0)
    what = f"{shape}, {ranks} ranks, tp {tp}, {1e3 * whole:g} ms, {'+'.join(sorted(forms)) or 'quiet'}"
    players = _Ranks(ranks)
    noise = _Noise(draw, ranks, forms, draw.choice((2, 4, 8)), size)
    noise.begin()
    for index in range(1, steps + 1):
        late = share * whole if cause is not None and is_late[pattern](index) else 0.0
        noise.step(index)
        _step(draw, players, noise, shape, tp, whole, index, rank, cause, late)
    return Drawn(Timeline(players.spans), rank, cause or Cause.OUTSIDE, pattern, ranks, tp, what)


def _step(
    draw: random.Random,
    players: _Ranks,
    noise: _Noise,
    shape: str,
    tp: int,
    whole: float,
    index: int,
    rank: int,
    cause: Cause | None,
    late: float,
) -> None:
    """Play a step of all ranks; `late` is the delay of `rank` in it."""
    count = len(players.now)
    begins = list(players.now)
    data = [tuple(range(each, count, tp)) for each in range(tp)]
    tensor = [tuple(range(each, each + tp)) for each in range(0, count, tp)]
    parts = {
        Cause.LOADER: 0.01,
        Cause.COPY: 0.01,
        Cause.FORWARD: 0.3,
        Cause.BACKWARD: 0.6,
        Cause.OPTIMIZER: 0.05,
    }

    def phase(kind: str, name: str, of: Cause, part: float = 1.0) -> None:
        seconds = [noise.of(each, of, parts[of] * part * whole, whole) for each in range(count)]
        if cause == of:
            seconds[rank] += late * part
        elif cause == Cause.MACHINE and of in _COMPUTE:
            seconds[rank] += late * part * parts[of] / sum(parts[each] for each in _COMPUTE)
        players.work(kind, name, seconds)

    def transfer(size: float, exposed: float) -> Callable[[tuple[int, ...]], float]:
        """A slow link adds its delay to what is exposed, in proportion."""

        def seconds(group: tuple[int, ...]) -> float:
            more = late * size / exposed if cause == Cause.LINK and rank in group else 0.0
            return (size * whole + more) * draw.lognormvariate(0, 0.08)

        return seconds

    blocks = 4
    exposed = {"plain": 0.03, "accumulate": 0.03, "gathered": 0.03 + 0.01 * 2 * blocks}[shape]
    exposed += 0.005 * 2 * blocks * (tp > 1)
    phase(Kind.DATA_WAIT, "", Cause.LOADER)
    phase(Kind.DATA_WAIT, "inputs", Cause.COPY)
    rounds = 3 if shape == "accumulate" else 1
    for turn in range(rounds):
        for kind, of in ((Kind.FORWARD, Cause.FORWARD), (Kind.BACKWARD, Cause.BACKWARD)):
            for block in range(blocks):
                tag = f"{kind} {turn} {block}"
                if shape == "gathered":
                    players.arrive(f"all_gather:{tag}", data, transfer(0.01, exposed))
                    players.wait(f"all_gather:{tag}")
                phase(kind, "", of, 1 / blocks / rounds)
                if tp > 1:
                    players.arrive(f"all_reduce:tensor {tag}", tensor, transfer(0.005, exposed))
                    players.wait(f"all_reduce:tensor {tag}")
                if of == Cause.BACKWARD and turn == rounds - 1:
                    players.arrive(f"reduce_scatter:bucket {block}", data, transfer(0.03, exposed))
    for block in range(blocks):
        players.wait(f"reduce_scatter:bucket {block}")
    phase(Kind.OPTIMIZER, "", Cause.OPTIMIZER)
    players.arrive("all_reduce:report", [tuple(range(count))], transfer(0.001, 1e9))
    players.wait("all_reduce:report")
    if "saves" in noise.forms and index % 20 == 0:
        players.work(Kind.CHECKPOINT, "", [0.3 * whole * draw.uniform(0.9, 1.1) for _ in range(count)])
    for each in range(count):
        span = each, Lane.COMPUTE, Kind.STEP, str(index), begins[each], players.now[each] - begins[each]
        players.spans.append(Span(*span))


def _is_right(case: Drawn, ranks: Sequence[int]) -> bool:
    """Whether the rank is named; groups of two share a link, which has two ends."""
    return tuple(ranks) == (case.rank,) or (
        case.cause == Cause.LINK and case.rank in ranks and len(ranks) <= 2
    )


def _judged(cases: int, seed: int, size: float) -> Iterator[tuple[Drawn, Verdict]]:
    for number in range(cases):
        case = drawn_case(seed + number, CAUSES[number % len(CAUSES)], size=size)
        yield case, verdict(case.timeline)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=1.0, help="size of all noise (default 1)")
    args = parser.parse_args()
    began = time.perf_counter()
    scores: dict[Cause, Score] = {}
    for case, found in _judged(args.cases, args.seed, args.noise):
        right = [each for each in found.stragglers if _is_right(case, each.ranks)]
        score = scores.setdefault(case.cause, Score())
        score.cases += 1
        score.named += len(found.stragglers)
        score.rank += bool(right)
        score.cause += any(each.cause == case.cause for each in right)
        score.pattern += any(each.pattern == case.pattern for each in right)
        if len(found.stragglers) != 1 or not right or right[0].cause != case.cause:
            said = [(each.ranks, str(each.cause), str(each.pattern)) for each in found.stragglers]
            print(f"{case.what}: rank {case.rank}, {case.cause}, {case.pattern}: {said}", file=sys.stderr)
    print(table(scores), flush=True)
    alarms = 0
    for number in range(args.windows):
        case = drawn_case(1_000_000 + args.seed + number, None, 42, args.noise)
        if found := verdict(case.timeline).stragglers:
            alarms += 1
            said = [(each.ranks, str(each.cause), str(each.pattern), round(each.share, 3)) for each in found]
            print(f"false alarm: {case.what}: {said}", file=sys.stderr)
    print(f"\nfalse alarms: {alarms} of {args.windows} windows of 40 steps")
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
