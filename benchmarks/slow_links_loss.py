"""The loss after equal tokens, and in equal time over slow links, of looser exchange beside dense.

Four workers train in processes of their own over shared memory: what they compute does not depend on links.
The loss is that of held-out text, and the learning rate falls by half a cosine over all steps. It was chosen
for dense steps, with a seed that is not shown. Local updates take it over, with the default outer settings.

With `--json FILE` every run is kept there when it has ended, and what the file has is not trained again.

Bytes are those of the formulas: how many times fewer than dense after the dense steps, and over the whole
training, where the dense steps count too.

Loss in equal time: when a method has made all its steps, at the tokens/s that `--only speed` measured, dense
has made fewer. Its loss then is read from its own course, in which the learning rate has not fallen yet.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slow_links_small import HELD_OUT, held_out, small_trainer
from slow_links_speed import formula_bytes

from shoal.machine.bench import describe
from shoal.parallel import outer_settings
from shoal.spec.plan import Plan
from shoal.testing.ranks import RankPool

__all__ = ["STEPS", "Loss", "Run", "at_equal_time", "measure_loss", "runs_of", "table"]

WORKERS = 4
STEPS = 1200
_EVERY = 200  # steps between two points of a course
_TIMEOUT = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """A method, and its settings.

    Attributes:
        exchange: The Plan's text without `dp` and `dense`.
        dense: First steps, in which gradients are averaged whole.
        asked: Share of the loss of dense by which the loss may be higher.
        steps: Steps of the training.
    """

    exchange: str = ""
    dense: int = 0
    asked: float | None = None
    steps: int = STEPS

    @property
    def plan(self) -> str:
        """The Plan's text."""
        parts = [f"dp={WORKERS}", self.exchange, f"dense={self.dense}" if self.dense else ""]
        return ",".join(filter(None, parts))

    @property
    def name(self) -> str:
        """The Plan's text, and the steps."""
        return f"{self.plan}, {self.steps} steps"

    @property
    def fewer(self) -> float:
        """How many times fewer bytes a step sends than a dense one, after the dense steps."""
        return formula_bytes("", WORKERS) / formula_bytes(self.exchange, WORKERS)

    @property
    def fewer_in_all(self) -> float:
        """The same over the whole training."""
        return self.steps / (self.dense + (self.steps - self.dense) / self.fewer)


@dataclass(frozen=True, slots=True)
class Loss:
    """What a run gave with one seed.

    Attributes:
        final: Held-out loss at the end, in nats a byte.
        course: Held-out loss after some numbers of steps.
    """

    final: float
    course: Mapping[float, float]


_UNBIASED = ("int8", "int4", "fp8")
_BIASED = ("sign", "topk:64", "topk:64:2bit", "random:64", "threshold:3", "powersgd:2")


def runs_of(steps: int = STEPS) -> list[Run]:
    """Return what is trained for this many steps, dense first.

    Kinds that err to one side and local updates have a tenth of dense steps, sparse local updates a fifth.
    """
    tenth, fifth = steps // 10, steps // 5
    return [
        Run(steps=steps),
        *(Run(f"compress={each}", steps=steps) for each in _UNBIASED),
        *(Run(f"compress={each}", tenth, steps=steps) for each in _BIASED),
        Run("exchange=local,every=20", tenth, steps=steps),
        Run("exchange=local,every=20,compress=int8", tenth, asked=0.01, steps=steps),
        Run("exchange=local,every=20,compress=topk:8:2bit", fifth, asked=0.02, steps=steps),
        Run("exchange=local,every=30,compress=topk:64:2bit,feedback=0.95", fifth, steps=steps),
    ]


def measure_loss(
    seeds: Sequence[int], steps: int, only: Sequence[str], speeds: Path | None, out: Path | None
) -> None:
    """Train with every method and seed, and print a table.

    Args:
        seeds: Seeds of the first weights and the order of samples.
        steps: Steps of each training.
        only: Texts of which one is in the method's Plan; dense is always among them.
        speeds: What `--only speed --json` wrote, for the losses in equal time.
        out: Where every figure goes.
    """
    print(describe(), end="\n\n", flush=True)
    chosen = [run for run in runs_of(steps) if not run.exchange or any(text in run.plan for text in only)]
    kept: dict[str, dict[str, Any]] = {}
    if out is not None and out.exists():
        kept = json.loads(out.read_text("utf-8"))
    with RankPool("shoal") as pool:
        for seed in seeds:
            for run in chosen:
                if str(seed) in kept.setdefault(run.name, {}):
                    continue
                start = time.perf_counter()
                found = pool.run(_train, WORKERS, run, seed, timeout=_TIMEOUT)[0]
                kept[run.name][str(seed)] = [found.final, dict(found.course)]
                took = time.perf_counter() - start
                print(
                    f"{run.name}, seed {seed}: {found.final:.4f}, {took:.0f} s", file=sys.stderr, flush=True
                )
                if out is not None:
                    out.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    losses = {run: [_loss(kept[run.name][str(seed)]) for seed in seeds] for run in chosen}
    print(table(losses, {} if speeds is None else _rates(speeds)))


def _loss(kept: Sequence[Any]) -> Loss:
    """Return the loss that a file has."""
    final, course = kept
    return Loss(final, {int(steps): loss for steps, loss in course.items()})


def at_equal_time(course: Mapping[float, float], steps: float) -> float:
    """Return the loss of a course after this many steps, or seconds, linear between its points."""
    points = sorted(course.items())
    before = max((point for point in points if point[0] <= steps), default=points[0])
    after = min((point for point in points if point[0] > steps), default=points[-1])
    if after[0] <= before[0]:
        return before[1]
    share = max(0.0, (steps - before[0]) / (after[0] - before[0]))
    return before[1] + share * (after[1] - before[1])


_HEADER = ["method", "dense steps", "outer rate, momentum", "fewer bytes, then", "in all", "loss (range)"]
_HEADER += ["over dense, by seed", "asked", "tokens/s over dense", "dense in equal time"]


def table(losses: Mapping[Run, Sequence[Loss]], rates: Mapping[str, float]) -> str:
    """Return the table of losses, in Markdown.

    Args:
        losses: By method, a loss for each seed.
        rates: Tokens a second over slow links, over those of dense, by the Plan's text without `dp`.
    """
    lines = [_HEADER, ["---"] * 3 + ["---:"] * 2 + ["---"] + ["---:"] * 4]
    reference = next(found for run, found in losses.items() if not run.exchange)
    for run, found in losses.items():
        finals = [each.final for each in found]
        over = [each.final / dense.final - 1 for each, dense in zip(found, reference, strict=True)]
        local = "local" in run.exchange
        faster = _in_all(run, rates.get(run.exchange))
        equal = (
            ""
            if faster is None
            else f"{fmean(at_equal_time(each.course, run.steps / faster) for each in reference):.4f}"
        )
        lines.append(
            [
                f"`{run.exchange or 'bucketed'}`",
                str(run.dense) if run.exchange else "all",
                "{:g}, {:g}".format(*outer_settings(Plan.parse(run.plan).exchanged)[:2]) if local else "",
                f"{run.fewer:,.0f}",
                f"{run.fewer_in_all:.1f}",
                f"{fmean(finals):.4f} ({min(finals):.4f} to {max(finals):.4f})",
                f"{median(over):+.2%} ({min(over):+.2%} to {max(over):+.2%})" if run.exchange else "",
                "" if run.asked is None else f"{run.asked:.0%}",
                "" if faster is None else f"{faster:.1f}",
                equal,
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _in_all(run: Run, faster: float | None) -> float | None:
    """Return how many times as many tokens a second a whole training makes, with its dense steps."""
    if faster is None or not run.exchange:
        return None
    return run.steps / (run.dense + (run.steps - run.dense) / faster)


def _rates(speeds: Path) -> dict[str, float]:
    """Return tokens a second over those of dense, by method, with four workers at 100 Mbit/s."""
    found = json.loads(speeds.read_text("utf-8"))[f"{WORKERS}@0.1"]
    dense = found["bucketed"]["tokens a second"]
    return {
        name: median(own / other for own, other in zip(each["tokens a second"], dense, strict=True))
        for name, each in found.items()
    }


def _train(run: Run, seed: int) -> Loss:
    """Train on one rank of the default group."""
    trainer = small_trainer(run.plan, WORKERS, run.steps, seed)
    samples, course = held_out(), dict[float, float]()
    for step in range(1, run.steps + 1):
        trainer.step()
        if step % _EVERY == 0:
            course[step] = trainer.validate(samples, HELD_OUT)
    trainer.close()
    return Loss(course[run.steps], course)
