"""The loss in equal time over slow links: exchange=auto beside each fixed exchange that it may choose.

Workers in emulated hosts train the model of `slow_links_small.py`, with a constant learning rate, for some
seconds each: those of steps, and with exchange=auto also those of its measurements and trials. Validation is
not counted. `auto` may go on for a quarter longer, to tell when it comes to the loss that the best fixed
exchange has at the end.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from slow_links_hosts import Workers
from slow_links_loss import at_equal_time
from slow_links_small import Point, Timed

from shoal.machine.bench import describe
from shoal.predict.planner import candidates
from shoal.testing.hosts import Hosts

__all__ = ["EXCHANGES", "Race", "measure_time", "table", "time_to"]

AUTO = "exchange=auto"
_LONGER = 1.25  # times as long as others that `auto` may train
_EVERY = 20
_SMOOTHED = 0.1  # share of the seconds over which losses are averaged

EXCHANGES = (*candidates(_EVERY), AUTO)
"""What is trained; the last one chooses among the others."""


class Race(NamedTuple):
    """The trainings of one network, by exchange: one for each seed, and the seconds that they were given."""

    seconds: float
    trained: Mapping[str, Sequence[Timed]]

    def losses(self, exchange: str) -> list[float]:
        """Return the loss at the end of the given seconds, by seed."""
        return [loss_at(each, self.seconds) for each in self.trained[exchange]]

    @property
    def best(self) -> str:
        """The fixed exchange with the least mean loss."""
        return min((each for each in self.trained if each != AUTO), key=lambda each: fmean(self.losses(each)))

    @property
    def times_as_long(self) -> list[float]:
        """How many times as long `auto` took to the loss of the best fixed exchange, by seed."""
        aims = self.losses(self.best)
        pairs = zip(self.trained[AUTO], aims, strict=True)
        return [time_to(each, aim) / self.seconds for each, aim in pairs]


def measure_time(
    networks: Sequence[str], seeds: Sequence[int], seconds: float, ends: Sequence[str], out: Path | None
) -> None:
    """Train over every network with each exchange, and print a table of each.

    Args:
        networks: Texts such as `4@0.1`.
        seeds: Seeds of the first weights and the order of samples.
        seconds: Seconds of each training.
        ends: Fixed exchanges whose texts end with one of these are trained.
        out: Where every figure goes.
    """
    print(describe(), end="\n\n", flush=True)
    kept: dict[str, Any] = {}
    exchanges = [each for each in EXCHANGES if each == AUTO or each.endswith(tuple(ends))]
    for text in networks:
        workers, rate = int(text.partition("@")[0]), float(text.partition("@")[2])
        trained: dict[str, list[Timed]] = {each: [] for each in exchanges}
        with Hosts(workers, rate * 1e9) as hosts, Workers(hosts, workers, ()) as ranks:
            for number, seed in enumerate(seeds):
                for exchange in exchanges if number % 2 == 0 else reversed(exchanges):
                    longer = _LONGER if exchange == AUTO else 1.0
                    found = ranks.train(exchange, longer * seconds, seed)
                    trained[exchange].append(found)
                    last = found.course[-1]
                    print(
                        f"{text} {exchange}, seed {seed}: {last.loss:.4f} after {last.steps} steps, "
                        f"load {os.getloadavg()[0]:.1f}",
                        *found.decisions,
                        sep="\n    ",
                        file=sys.stderr,
                        flush=True,
                    )
        race = Race(seconds, trained)
        print(f"### {workers} workers, {rate:g} Gbit/s\n\n{table(race)}\n\n{verdict(race)}\n", flush=True)
        kept[text] = {name: [each._asdict() for each in found] for name, found in trained.items()}
        if out is not None:
            out.write_text(json.dumps(kept, indent=1), encoding="utf-8")


def table(race: Race) -> str:
    """Return the table of a network, in Markdown."""
    lines = [["exchange", f"steps in {race.seconds:g} s", "loss (range)"], ["---", "---:", "---"]]
    for exchange, found in race.trained.items():
        losses = race.losses(exchange)
        courses = [{at.seconds: at.steps for at in each.course} for each in found]
        steps = fmean(at_equal_time(course, race.seconds) for course in courses)
        lines.append(
            [
                f"`{exchange}`",
                f"{steps:,.0f}",
                f"{fmean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(race: Race) -> str:
    """Say how `auto` compares with the best fixed exchange, and what it followed."""
    taken = [f"{each:.2f}" if math.isfinite(each) else f"above {_LONGER}" for each in race.times_as_long]
    followed = "; ".join(f"`{each.followed}`" for each in race.trained[AUTO])
    return (
        f"`{AUTO}` took, by seed, {', '.join(taken)} times as long to the loss of `{race.best}`, the best "
        f"fixed exchange. At the end it followed {followed}."
    )


def loss_at(found: Timed, seconds: float) -> float:
    """Return the loss after some seconds, linear between the points of the course, which are smoothed."""
    return at_equal_time({at.seconds: at.loss for at in smoothed(found.course)}, seconds)


def smoothed(course: Sequence[Point]) -> list[Point]:
    """Return a course with the mean loss of the last points before each, over a tenth of its seconds.

    With a constant learning rate held-out losses go up and down by some percent from point to point.
    """
    span = _SMOOTHED * course[-1].seconds
    return [
        at._replace(
            loss=fmean(each.loss for each in course if at.seconds - span <= each.seconds <= at.seconds)
        )
        for at in course
    ]


def time_to(found: Timed, aim: float) -> float:
    """Return the seconds to a loss: the first time that the course crosses it; infinite if it does not."""
    course = smoothed(found.course)
    before = course[0]
    for at in course:
        if at.loss <= aim:
            if at is before or at.loss == before.loss:
                return at.seconds
            share = (before.loss - aim) / (before.loss - at.loss)
            return before.seconds + share * (at.seconds - before.seconds)
        before = at
    return float("inf")
