"""Does the verdict name the rank and the cause of a delay, and nothing where there is none?

    python benchmarks/stragglers.py jitter RUN FILE.csv    # how phases vary in a recorded run
    python benchmarks/stragglers.py simulated              # 200 delays, 1,000 windows without one

`simulated` plays the ranks of seven layouts (`shoal.testing.delays`) with the jitter of a real run, and
delays one phase of one rank: by 10 % of a step in every step, or by 40 % in every fourth or in 15 steps in a
row. It prints the table of `benchmarks/stragglers.md`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.analyze.diagnosis import Cause, Pattern, Verdict, verdict
from shoal.predict.simulate import mark_bubbles
from shoal.spec.run import Run
from shoal.spec.timeline import Timeline
from shoal.testing.delays import Delay, Jitter, Layout, delayed_timeline

__all__ = ["CAUSES", "Case", "Score", "cases", "judge"]

JITTER = Path(__file__).parent / "data" / "step_jitter.csv"
CAUSES = (Cause.LOADER, Cause.COPY, Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER, Cause.LINK)
LAYOUTS = (
    *(Layout(2), Layout(4), Layout(2, 2), Layout(2, 1, 2)),
    *(Layout(8), Layout(4, 2), Layout(2, 2, 2)),
)
SHARE = 0.10
STEPS = 62  # 60 after warm-up
WINDOW = 42


@dataclass(frozen=True)
class Case:
    """A delay to be found."""

    layout: Layout
    delay: Delay
    pattern: Pattern
    seed: int

    @property
    def is_link_of_one_group(self) -> bool:
        """Whether the delay is in a link of the only group, so that its rank cannot be told."""
        layout = self.layout
        return self.delay.cause == Cause.LINK and layout.tp * layout.pp == 1 and layout.dp > 2


@dataclass
class Score:
    """What verdicts said of delays."""

    cases: int = 0
    named: int = 0
    rank: int = 0
    cause: int = 0
    pattern: int = 0

    def add(self, case: Case, found: Verdict) -> None:
        """Count a verdict: every straggler that it names counts for precision, the right one for recall."""
        self.cases += 1
        self.named += len(found.stragglers)
        right = [each for each in found.stragglers if self._is_right(case, each.ranks)]
        self.rank += bool(right)
        self.cause += any(each.cause == case.delay.cause for each in right)
        self.pattern += any(each.pattern == case.pattern for each in right)

    @staticmethod
    def _is_right(case: Case, ranks: Sequence[int]) -> bool:
        """Whether the rank is named; a link of two ranks has two ends."""
        if case.delay.cause == Cause.LINK and case.layout.ranks == 2:
            return set(ranks) == {0, 1}
        return tuple(ranks) == (case.delay.rank,)


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield delays: causes in turn, with random layouts, ranks and patterns."""
    randomness = random.Random(seed)
    for number in range(count):
        cause = CAUSES[number % len(CAUSES)]
        while True:
            layout = randomness.choice(LAYOUTS)
            case = _case(layout, cause, randomness, number)
            if not case.is_link_of_one_group:
                break
        yield case


def _case(layout: Layout, cause: Cause, randomness: random.Random, seed: int) -> Case:
    patterns = [Pattern.PERSISTENT] * 3 + ([] if cause == Cause.LINK else [Pattern.PERIODIC, Pattern.ONCE])
    pattern = randomness.choice(patterns)
    first = randomness.randrange(5, STEPS - 20)
    is_late: dict[Pattern, Callable[[int], bool]] = {
        Pattern.PERSISTENT: lambda step: True,
        Pattern.PERIODIC: lambda step: step % 4 == 0,
        Pattern.ONCE: lambda step: first <= step < first + 15,
    }
    share = SHARE if pattern == Pattern.PERSISTENT else 4 * SHARE
    rank = randomness.randrange(layout.ranks)
    return Case(layout, Delay(rank, cause, share, is_late[pattern]), pattern, seed)


def judge(layout: Layout, timeline: Timeline) -> Verdict:
    """Return the verdict; with two ranks the transfers of its one group are held to what a model predicts."""
    predicted = {f"all_reduce:bucket {bucket}": 0.006 for bucket in range(4)} if layout.ranks == 2 else None
    return verdict(mark_bubbles(timeline), predicted=predicted)


def score(chosen: Iterable[Case], jitter: Jitter) -> dict[Cause, Score]:
    """Judge the cases."""
    scores: dict[Cause, Score] = {}
    for case in chosen:
        timeline = delayed_timeline(case.layout, STEPS, jitter, case.seed, case.delay)
        found = judge(case.layout, timeline)
        one = Score()
        one.add(case, found)
        if not (one.rank and one.cause and one.pattern and one.named == 1):
            said = [(each.ranks, str(each.cause), str(each.pattern)) for each in found.stragglers]
            where = f"{case.layout}, rank {case.delay.rank}, {case.delay.cause}, {case.pattern}"
            print(f"missed or more: {where}: {said}", file=sys.stderr)
        scores.setdefault(case.delay.cause, Score()).add(case, found)
    return scores


def false_alarms(windows: int, jitter: Jitter) -> tuple[int, int]:
    """Return the windows without delay in which a straggler was named, and their number."""
    alarms = 0
    for seed in range(windows):
        layout = LAYOUTS[seed % len(LAYOUTS)]
        found = judge(layout, delayed_timeline(layout, WINDOW, jitter, 1_000_000 + seed))
        alarms += bool(found.stragglers)
        if found.stragglers:
            said = [(each.ranks, str(each.cause), str(each.pattern), each.share) for each in found.stragglers]
            print(f"false alarm: {layout}, window {seed}: {said}", file=sys.stderr)
    return alarms, windows


def table(scores: dict[Cause, Score]) -> str:
    """Return the table of precision and recall."""
    every = Score(*(sum(getattr(each, name) for each in scores.values()) for name in Score.__annotations__))
    lines = [
        "| delay in | cases | rank: precision | recall | cause: precision | recall | pattern |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, each in [*scores.items(), ("all", every)]:
        rates = (
            *(each.rank / max(each.named, 1), each.rank / each.cases),
            *(each.cause / max(each.named, 1), each.cause / each.cases),
            each.pattern / each.cases,
        )
        lines.append(f"| {name} | {each.cases} | {' | '.join(f'{rate:.3f}' for rate in rates)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the verdict name the rank and the cause of a delay?")
    commands = parser.add_subparsers(required=True, dest="command")
    recorded = commands.add_parser("jitter", help="write how phases vary in a recorded run")
    recorded.add_argument("run", type=Path)
    recorded.add_argument("file", type=Path)
    simulated = commands.add_parser("simulated", help="judge simulated runs")
    simulated.add_argument("--cases", type=int, default=200)
    simulated.add_argument("--windows", type=int, default=1000)
    simulated.add_argument("--jitter", type=Path, default=JITTER)
    args = parser.parse_args()
    if args.command == "jitter":
        Jitter.of(Timeline.read(Run.open(args.run).timeline)).write(args.file)
        return
    jitter = Jitter.read(args.jitter)
    began = time.perf_counter()
    print(table(score(cases(args.cases), jitter)), flush=True)
    alarms, windows = false_alarms(args.windows, jitter)
    print(f"\nfalse alarms: {alarms} of {windows} windows of {WINDOW - 2} steps")
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
