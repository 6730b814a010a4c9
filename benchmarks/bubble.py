"""The bubble that a report finds, beside the bubble of the schedule that was run: stages of known times.

    python benchmarks/bubble.py [--ranks 4] [--unit 0.03] [--steps 12]

Real ranks train a pipeline whose stages sleep in forward, in the gradient of the input and in that of the
weights, under each schedule: first all stages for equally long, then for times that differ. As ranks sleep,
more of them than cores run as on cores of their own. All of the report's idle time (bubble, straggler wait
and exposed communication) is held to that of the table with the times of each stage. The report's bubble is
held to what the schedule forces: the idle time of each rank in the table with the mean time of stages, but no
more than it has in the table with the times of each stage, where the slowest rank has less. Shares are of the
step, in percent; differences in points.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from stragglers_real import Sleeps
from torch import nn
from torch.utils.data import TensorDataset

from shoal.parallel.pipeline import runtime
from shoal.parallel.pipeline.split_backward import WeightGradients
from shoal.predict.simulate import measured_timeline
from shoal.spec.plan.schedules import Played, Times, make, play
from shoal.spec.run import Run
from shoal.spec.timeline import explain
from shoal.testing import RankPool
from shoal.train import OptimizerConfig, Trainer

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
"""By schedule, the stages on a rank."""
_UNEVEN = (1.0, 1.4, 0.8, 1.2, 0.6, 1.0, 1.3, 0.7)
_MICROBATCHES = 8
_TARGET = 2.0  # points


class Stage(nn.Module):
    """A small layer that takes a known time.

    Args:
        forward: Seconds of a forward.
        backward: Seconds of the backward, without the part of the weights if that is deferred.
    """

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.forward_seconds, self.backward_seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output of the shape of `x`, [batch, 16]."""
        slept: torch.Tensor = Sleeps.apply(self.layer(x), self.forward_seconds, self.backward_seconds)
        return slept


def train(folder: Path, schedule: str, ranks: int, seconds: Sequence[float], steps: int) -> None:
    """Train as one of the ranks.

    Args:
        folder: The Run to make.
        schedule: Name of the schedule.
        ranks: Ranks of the pipeline.
        seconds: By stage, the seconds of a forward, of I and of W each.
        steps: Number of steps.
    """
    torch.manual_seed(0)
    is_split = schedule.startswith("zb")
    undo = _sleep_for_weights() if is_split else lambda: None
    model = nn.Sequential(*(Stage(each, each if is_split else 2 * each) for each in seconds))
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    virtual = f",virtual={SCHEDULES[schedule]}" if SCHEDULES[schedule] > 1 else ""
    trainer = Trainer(
        model,
        TensorDataset(data, data.sort().values),
        f"pp={ranks},schedule={schedule}{virtual},microbatch=1,split={'-'.join('1' * len(seconds))}",
        batch=_MICROBATCHES,
        steps=steps,
        loss=F.mse_loss,
        optimizer=OptimizerConfig(warmup=1),
        run=folder,
    )
    for _ in range(steps):
        trainer.step()
    trainer.close()
    undo()


def _sleep_for_weights() -> Callable[[], None]:
    """Let the gradients of a stage's weights sleep as long as that of its input; return what undoes it."""
    split, run = runtime.split_backward, WeightGradients.run
    seconds: dict[int, float] = {}

    def split_and_note(*given: Any) -> WeightGradients:
        weights = split(*given)
        seconds[id(weights)] = Sleeps.slept
        return weights

    def sleep_and_run(self: WeightGradients) -> None:
        time.sleep(seconds.pop(id(self)))
        run(self)

    def undo() -> None:
        runtime.split_backward, WeightGradients.run = split, run  # type: ignore[method-assign]

    runtime.split_backward, WeightGradients.run = split_and_note, sleep_and_run  # type: ignore[method-assign]
    return undo


def bubbles_of_table(schedule: str, ranks: int, seconds: Sequence[float]) -> tuple[float, float]:
    """Return the time that the schedule forces ranks to be idle, and all idle time, as shares of the step.

    What is forced on a rank is its idle time with the mean times of the stages, as far as it has any with
    their own times.
    """

    def played(times: Sequence[float]) -> Played:
        every = tuple(times)
        table = make(schedule, ranks, SCHEDULES[schedule], _MICROBATCHES)
        return play(table, Times(every, every, every, (0.0,) * (len(every) - 1)))

    mean, own = played([fmean(seconds)] * len(seconds)), played(seconds)
    forced = fmean(min(mean.idle(rank), own.idle(rank)) for rank in range(ranks))
    return forced / own.makespan, own.bubble


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--unit", type=float, default=0.03, help="seconds of a forward (default 0.03)")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    print("| schedule | stages | bubble | of the table | difference | idle | of the table | difference |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    largest = off = 0.0
    with tempfile.TemporaryDirectory() as parent, RankPool("shoal") as pool:
        for schedule, virtual in SCHEDULES.items():
            for name in ("equal", "uneven"):
                stages = args.ranks * virtual
                factors = [1.0 if name == "equal" else _UNEVEN[each % 8] for each in range(stages)]
                seconds = [args.unit / virtual * factor for factor in factors]
                folder = Path(parent) / f"{schedule}-{name}"
                pool.run(train, args.ranks, folder, schedule, args.ranks, seconds, args.steps)
                breakdown = explain(measured_timeline(Run.open(folder)))
                parts = breakdown.parts
                steps = [each for rank in breakdown.ranks for each in rank.steps.values()]
                off = max(off, *(100 * abs(sum(each.disjoint().values()) / each.wall - 1) for each in steps))
                idle = parts.bubble + parts.straggler_wait + parts.exposed_communication
                forced, all_idle = bubbles_of_table(schedule, args.ranks, seconds)
                pairs = (parts.bubble / parts.wall, forced), (idle / parts.wall, all_idle)
                cells = [
                    f"{100 * found:.1f} % | {100 * told:.1f} % | {100 * (found - told):+.2f}"
                    for found, told in pairs
                ]
                largest = max(largest, *(100 * abs(found - told) for found, told in pairs))
                print(f"| {schedule} | {name} | {' | '.join(cells)} |", flush=True)
    print(
        f"\n{args.ranks} ranks, {_MICROBATCHES} micro-batches, {1e3 * args.unit:g} ms a forward of a rank; "
        f"largest difference {largest:.2f} points (target {_TARGET:g}); parts sum to the wall time within "
        f"{off:.2g} %"
    )


if __name__ == "__main__":
    main()
