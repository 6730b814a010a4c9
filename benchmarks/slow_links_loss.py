"""The loss after equal tokens, and in equal time over slow links, of looser exchange beside dense.

Four workers train in processes of their own over shared memory: what they compute does not depend on links.
The loss is that of held-out text, and the learning rate falls by half a cosine over all steps. Each method
has the settings that were best in a few trials with the first seed; for dense that is the learning rate.

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

from slow_links_speed import formula_bytes

import shoal
from shoal.bench import describe
from shoal.data import DataConfig, prepare
from shoal.models import Transformer, TransformerConfig
from shoal.plan import Plan
from shoal.testing.ranks import RankPool
from shoal.train import OptimizerConfig

__all__ = ["DENSE", "RUNS", "Loss", "Run", "at_equal_time", "measure_loss", "table"]

WORKERS = 4
SEQUENCES = 8  # of a worker in a step
STEPS = 2400
MODEL = TransformerConfig(
    vocab_size=256, layers=2, hidden=64, heads=4, kv_heads=4, ffn=176, seq=64, tie_embeddings=True
)
"""116 thousand parameters, so that thousands of steps fit in a minute."""

_EVERY = 200  # steps between two points of a course
_HELD_OUT = 512  # samples
_RATE = 1e-2
_TIMEOUT = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """A method, and its settings.

    Attributes:
        exchange: The Plan's text without `dp` and `dense`.
        dense: First steps, in which gradients are averaged whole.
        outer_rate, outer_momentum: Of local updates.
        asked: Share of the loss of dense by which the loss may be higher.
    """

    exchange: str = ""
    dense: int = 0
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    asked: float | None = None

    @property
    def plan(self) -> str:
        """The Plan's text."""
        parts = [f"dp={WORKERS}", self.exchange, f"dense={self.dense}" if self.dense else ""]
        return ",".join(filter(None, parts))

    @property
    def fewer(self) -> float:
        """How many times fewer bytes a step sends than a dense one, after the dense steps."""
        return formula_bytes("", WORKERS) / formula_bytes(self.exchange, WORKERS)

    @property
    def fewer_in_all(self) -> float:
        """The same over the whole training."""
        return STEPS / (self.dense + (STEPS - self.dense) / self.fewer)


@dataclass(frozen=True, slots=True)
class Loss:
    """What a run gave with one seed.

    Attributes:
        final: Held-out loss at the end, in nats a byte.
        course: Held-out loss after some numbers of steps.
    """

    final: float
    course: Mapping[int, float]


DENSE = Run()
RUNS = (
    DENSE,
    Run("exchange=local,every=20,compress=int8", 600, 1.0, 0.5, asked=0.01),
    Run("exchange=local,every=20,compress=topk:8:2bit", 600, 1.0, 0.5, asked=0.02),
)
"""What is trained."""


def measure_loss(seeds: Sequence[int], only: Sequence[str], speeds: Path | None, out: Path | None) -> None:
    """Train with every method and seed, and print a table.

    Args:
        seeds: Seeds of the first weights and the order of samples.
        only: Texts of which one is in the method's Plan; dense is always among them.
        speeds: What `--only speed --json` wrote, for the losses in equal time.
        out: Where every figure goes.
    """
    print(describe(), end="\n\n", flush=True)
    losses: dict[Run, list[Loss]] = {}
    with RankPool("shoal") as pool:
        for run in RUNS:
            if run is not DENSE and not any(text in run.plan for text in only):
                continue
            for seed in seeds:
                start = time.perf_counter()
                found = pool.run(_train, WORKERS, run, seed, timeout=_TIMEOUT)[0]
                losses.setdefault(run, []).append(found)
                took = time.perf_counter() - start
                print(
                    f"{run.plan}, seed {seed}: {found.final:.4f}, {took:.0f} s", file=sys.stderr, flush=True
                )
    rates = {} if speeds is None else _rates(speeds)
    print(table(losses, rates))
    if out is not None:
        figures = {
            run.plan: [[each.final, dict(each.course)] for each in found] for run, found in losses.items()
        }
        out.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def at_equal_time(course: Mapping[int, float], steps: float) -> float:
    """Return the loss of a course after this many steps, linear between its points."""
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
    for run, found in losses.items():
        finals = [each.final for each in found]
        over = [each.final / dense.final - 1 for each, dense in zip(found, losses[DENSE], strict=True)]
        local = "local" in run.exchange
        faster = _in_all(run, rates.get(run.exchange))
        equal = "" if faster is None else f"{fmean(_dense_then(each, faster) for each in losses[DENSE]):.4f}"
        lines.append(
            [
                f"`{run.exchange or 'bucketed'}`",
                str(run.dense) if run.exchange else "all",
                f"{run.outer_rate:g}, {run.outer_momentum:g}" if local else "",
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
    return None if faster is None or not run.exchange else STEPS / (run.dense + (STEPS - run.dense) / faster)


def _dense_then(dense: Loss, faster: float) -> float:
    return at_equal_time(dense.course, STEPS / faster)


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
    model = Transformer(MODEL)
    model.initialize(seed)
    data = prepare(DataConfig())
    trainer = shoal.Trainer(
        model,
        data.samples("train", MODEL.seq),
        Plan.parse(run.plan),
        batch=WORKERS * SEQUENCES,
        steps=STEPS,
        optimizer=OptimizerConfig(
            learning_rate=_RATE,
            warmup=50,
            outer_rate=run.outer_rate,
            outer_momentum=run.outer_momentum,
        ),
        seed=seed,
    )
    held_out = data.samples("validation", MODEL.seq)
    course = {}
    for step in range(1, STEPS + 1):
        trainer.step()
        if step % _EVERY == 0:
            course[step] = trainer.validate(held_out, _HELD_OUT)
    trainer.close()
    return Loss(course[STEPS], course)
