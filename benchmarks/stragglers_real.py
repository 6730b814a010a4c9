"""Does the verdict name a delay that is slept on one of two ranks that really train?

    python benchmarks/stragglers_real.py [--share 0.1] [--rounds 2]

Two ranks train a small model under dp=2. First nothing is delayed, for the median step; then one rank sleeps
for a share of that step in its loader, copy, forward, backward or optimizer; then nothing is delayed again.
It prints what the verdict says of each run. While a loader sleeps, data are prepared beside it, so it sleeps
longer by what it waits for them without delay. A slow link of two ranks has no peer to be compared with, so
it is left to the simulated runs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shoal.analyze.diagnosis import Cause, Verdict, verdict
from shoal.predict.simulate import measured_timeline
from shoal.spec.run import Run
from shoal.spec.timeline import Kind
from shoal.testing import RankPool
from shoal.train import OptimizerConfig, Trainer
from shoal.train.micro_batch import Inputs, Reader
from shoal.train.optimizer_step import Update

CAUSES = (Cause.LOADER, Cause.COPY, Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER)
STEPS = 124
_METHODS: dict[Cause, tuple[type, str]] = {
    Cause.LOADER: (Reader, "read"),
    Cause.COPY: (Inputs, "move"),
    Cause.OPTIMIZER: (Update, "make"),
}


class Sleeps(torch.autograd.Function):
    """Pass values on, and sleep in forward and backward for the given seconds.

    Attributes:
        slept: Seconds of the last backward of this process.
    """

    slept = 0.0

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        """Sleep, and return the values."""
        ctx.seconds = backward
        time.sleep(forward)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sleep, and return the gradient."""
        time.sleep(ctx.seconds)
        Sleeps.slept = ctx.seconds
        return gradient, None, None


class Model(nn.Module):
    """Some layers, with a place that sleeps between them."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width))
        self.last = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64))
        self.forward_seconds = self.backward_seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output of the shape of `x`, [batch, 64]."""
        return self.last(Sleeps.apply(self.first(x), self.forward_seconds, self.backward_seconds))


def train(folder: Path, cause: Cause | None, late: int, seconds: float) -> None:
    """Train as one of two ranks; the rank `late` sleeps in a phase of every step."""
    torch.manual_seed(0)
    model, mine = Model(), cause if dist.get_rank() == late else None
    if mine == Cause.FORWARD:
        model.forward_seconds = seconds
    if mine == Cause.BACKWARD:
        model.backward_seconds = seconds
    restore = _delay(mine, seconds)
    data = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        model,
        TensorDataset(data, data.sort().values),
        "dp=2",
        batch=1024,
        steps=STEPS,
        loss=F.mse_loss,
        optimizer=OptimizerConfig(warmup=1),
        run=folder,
    )
    for _ in range(STEPS):
        trainer.step()
    trainer.close()
    restore()


def _delay(cause: Cause | None, seconds: float) -> Callable[[], None]:
    """Let the method of a phase sleep first; return what puts it back."""
    if cause not in _METHODS:
        return lambda: None
    owner, name = _METHODS[cause]
    method = getattr(owner, name)

    def delayed(*given: Any, **named: Any) -> Any:
        if cause != Cause.COPY:
            time.sleep(seconds)
            return method(*given, **named)
        # The copy has its span within the method: sleep in the first of its calls.
        inputs, micro_batch = given

        def mapped(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            time.sleep(seconds)
            return micro_batch.map(function)

        return method(inputs, _Mapped(mapped))

    setattr(owner, name, delayed)
    return lambda: setattr(owner, name, method)


class _Mapped:
    """A micro-batch whose `map` is replaced."""

    def __init__(self, mapped: Callable[..., Any]) -> None:
        self.map = mapped


def judged(
    pool: RankPool, folder: Path, cause: Cause | None, late: int, seconds: float
) -> tuple[Verdict, float, float]:
    """Return the verdict on a run, and the seconds of its median step and of its median wait for data."""
    pool.run(train, 2, folder, cause, late, seconds)
    timeline = measured_timeline(Run.open(folder))
    steps = [step for index in timeline.steps()[5:] if (step := timeline.step(0, index)) is not None]
    loads = [span.duration for span in timeline.of(0) if span.kind == Kind.DATA_WAIT]
    return verdict(timeline), median(step.duration for step in steps), median(loads)


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the verdict name a delay that is slept on a rank?")
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    randomness = random.Random(args.seed)
    right = named = delayed = clean = alarms = 0
    print("| delay in | rank | step | verdict |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as parent, RankPool("shoal") as pool:
        _, step, load = judged(pool, Path(parent) / "first", None, 0, 0.0)
        for round_ in range(args.rounds):
            for cause in (*CAUSES, None):
                late = randomness.randrange(2)
                folder = Path(parent) / f"{round_}-{cause}"
                sleep = args.share * step + (load if cause == Cause.LOADER else 0.0)
                found, seconds, _ = judged(pool, folder, cause, late, sleep)
                said = [(each.ranks, each.cause, each.pattern) for each in found.stragglers]
                if cause is None:
                    clean += 1
                    alarms += bool(said)
                else:
                    delayed += 1
                    named += len(said)
                    right += any(each[:2] == ((late,), cause) for each in said)
                words = "; ".join(f"rank {ranks[0]}, {why}, {when}" for ranks, why, when in said) or "nobody"
                print(f"| {cause or 'nothing'} | {late} | {seconds * 1e3:.1f} ms | {words} |", flush=True)
    print(
        f"\nrank and cause: {right} of {delayed} found, {named} named; {alarms} of {clean} clean runs with a "
        f"straggler. The delay was {args.share * step * 1e3:.2f} ms."
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
