"""How often does `shoal compare` find a step that is 3 % slower, and how often does it invent a difference?

    python benchmarks/compare_runs.py [--repetitions 100] [--real DIR [--pairs 10] [--steps 600]]

Two runs of synthetic steps follow one another on one machine, or are side by side. Their noise has the forms
that steps of real runs show, alone and together (`NOISES`): steps that depend on their neighbours, single
slow steps, a neighbour on the machine that comes and goes, and drift. In one half of the pairs nothing
differs; in the other half backward takes longer by 3 % of the step. `--real` does the same with two Trainers
that take turns, step by step; a wait in forward makes the second slower.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.analyze.compare import Difference, RunValues, Verdict, differences
from shoal.machine.bench import describe
from shoal.spec.run import Run

SHARES = {"forward": 0.3, "backward": 0.5, "optimizer": 0.08, "exposed_communication": 0.12}
"""Parts of a step of one second."""


@dataclass(frozen=True)
class Noise:
    """The noise of step times, as shares of a step.

    Attributes:
        name: Its name in the table.
        own: Deviation of steps, half of which they inherit from the step before.
        parts: Deviation of the parts of a step, each by itself.
        slow: Share of steps that take 1.5 to 4 times as long.
        neighbour: By how much steps are slower while a neighbour works.
        busy: Share of the time in which it works, 40 steps at once in the mean.
        drift: The most by which a machine becomes slower or quicker during one run.
        walk: Deviation of a random walk from the begin to the end of one run.
    """

    name: str
    own: float = 0.02
    parts: float = 0.02
    slow: float = 0.02
    neighbour: float = 0.0
    busy: float = 0.2
    drift: float = 0.0
    walk: float = 0.0

    def draw(self, steps: int, random: np.random.Generator) -> np.ndarray:
        """Return the logarithms of the times of steps, in order."""
        inherited = 0.5
        shocks = random.standard_normal(steps) * np.sqrt(1 - inherited**2)
        own = np.zeros(steps)
        for step in range(1, steps):
            own[step] = inherited * own[step - 1] + shocks[step]
        found = self.own * own
        found += np.log(np.where(random.random(steps) < self.slow, random.uniform(1.5, 4, steps), 1.0))
        found += self.neighbour * _visits(steps, self.busy, random)
        found += random.uniform(-self.drift, self.drift) * np.arange(steps) / (steps / 2)
        return found + np.cumsum(random.standard_normal(steps)) * self.walk / np.sqrt(steps / 2)


NOISES = (
    Noise("steps depend on one another"),
    Noise("a neighbour works a fifth of the time", neighbour=0.15),
    Noise("the machine drifts by up to 1 % a run", drift=0.01),
    Noise("the machine drifts by up to 3 % a run", drift=0.03),
    Noise("a random walk of 1 % a run", walk=0.01),
    Noise("all of these, with 1 % of drift and walk", neighbour=0.15, drift=0.01, walk=0.01),
)


def _visits(steps: int, busy: float, random: np.random.Generator) -> np.ndarray:
    """Return 1 for each step in which the neighbour works, else 0."""
    away, there = 40 * (1 - busy) / busy, 40.0
    works, at, found = bool(random.random() < busy), 0, np.zeros(steps)
    while at < steps:
        length = 1 + int(random.exponential(there if works else away))
        found[at : at + length] = works
        at, works = at + length, not works
    return found


def pair(
    noise: Noise, steps: int, slower: float, random: np.random.Generator, *, in_turns: bool = False
) -> tuple[RunValues, RunValues]:
    """Return two runs; backward of the second is slower by a share of the step.

    One follows the other, or they take turns step by step.
    """
    common = np.exp(noise.draw(2 * steps, random))
    parts = {
        name: share * common * np.exp(noise.parts * random.standard_normal(2 * steps))
        for name, share in SHARES.items()
    }
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if in_turns else (slice(0, steps), slice(steps, None))
    )
    parts["backward"][second] += slower * common[second]
    parts["step"] = np.sum(list(parts.values()), axis=0)
    starts = np.cumsum(parts["step"]) - parts["step"]
    return _values(parts, starts, first), _values(parts, starts, second)


def _values(parts: dict[str, np.ndarray], starts: np.ndarray, which: slice) -> RunValues:
    return RunValues(
        path="",
        plan="",
        ranks=2,
        starts=tuple(starts[which].tolist()),
        kinds={name: tuple(values[which].tolist()) for name, values in parts.items()},
        collectives={},
        tokens_per_second=tuple((8192 / parts["step"][which]).tolist()),
        memory=None,
    )


def rates(
    noise: Noise, steps: int, repetitions: int, slower: float, seed: int, *, in_turns: bool = False
) -> tuple[int, int]:
    """Return in how many pairs any difference was invented, and in how many the slower step was found."""
    random = np.random.default_rng(seed)

    def drawn(extra: float) -> list[Difference]:
        return differences(*pair(noise, steps, extra, random, in_turns=in_turns))

    invented = sum(any(map(differs, drawn(0.0))) for _ in range(repetitions))
    found = sum(is_found(drawn(slower)) for _ in range(repetitions))
    return invented, found


def differs(row: Difference) -> bool:
    """Return whether a difference is claimed."""
    return row.verdict in (Verdict.HIGHER, Verdict.LOWER)


def is_found(rows: list[Difference]) -> bool:
    """Return whether the step is found slower."""
    return any(row.name == "step" and row.verdict == Verdict.HIGHER for row in rows)


def real_pairs(
    folder: Path, steps: int, slower: float, count: int = 1
) -> Iterator[tuple[str, list[Difference]]]:
    """Yield the differences of pairs of real runs that take turns, without and with a slower forward."""
    for number in range(count):
        for name, extra in (("equal", 0.0), ("slower", slower)):
            first, second = take_turns(folder / f"{name}-{number}", steps, extra)
            yield name, differences(RunValues.of(first), RunValues.of(second))


def take_turns(folder: Path, steps: int, slower: float) -> tuple[Run, Run]:
    """Train two models in turns, step by step; forward of the second waits for a share of its step."""
    import torch
    from torch import nn

    import shoal

    torch.set_num_threads(1)
    inputs = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sort().values)
    paths = folder / "first", folder / "second"
    trainers = []
    for path in paths:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        trainers.append(
            shoal.Trainer(model, data, "dp=1", batch=256, steps=steps, loss=nn.functional.mse_loss, run=path)
        )
    pause = 0.0
    hook = trainers[1].parallel.module.register_forward_pre_hook(lambda *_: _spin(pause))
    times = []
    for step in range(steps):
        for trainer in trainers:
            times.append(trainer.step().seconds)
        if step == 20:
            pause = slower * float(np.median(times))
    hook.remove()
    for trainer in trainers:
        trainer.close()
    return Run.open(paths[0]), Run.open(paths[1])


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def table(repetitions: int, slower: float) -> str:
    """Return a table in Markdown: how often a difference was invented, how often the slower step found."""
    of = f"of {repetitions}"
    head = f"| noise | runs | steps of a run | invented, {of} | {slower:.0%} found, {of} |"
    lines = [head, "| --- | --- | --- | --- | --- |"]
    for seed, noise in enumerate(NOISES):
        for order, steps in itertools.product(("in turns", "one after the other"), (300, 1000)):
            in_turns = order == "in turns"
            invented, found = rates(noise, steps, repetitions, slower, seed, in_turns=in_turns)
            lines.append(f"| {noise.name} | {order} | {steps} | {invented} | {found} |")
    return "\n".join(lines)


def real_table(folder: Path, steps: int, slower: float, count: int) -> str:
    """Return what was told of real runs that took turns, and how large the step's change was."""
    rows = list(real_pairs(folder, steps, slower, count))
    changes = {name: [_step(found).change or 0.0 for kind, found in rows if kind == name] for name, _ in rows}
    invented = sum(any(map(differs, found)) for kind, found in rows if kind == "equal")
    told = sum(is_found(found) for kind, found in rows if kind == "slower")
    spans = {name: f"{min(each):+.2%} to {max(each):+.2%}" for name, each in changes.items()}
    return (
        f"Real runs of {steps} steps that take turns, {count} pairs: {invented} with an invented difference "
        f"(step {spans['equal']}); {slower:.0%} found in {told} (step {spans['slower']}).\n\n"
        f"    {describe()}"
    )


def _step(rows: list[Difference]) -> Difference:
    return next(row for row in rows if row.name == "step")


def main() -> int:
    parser = argparse.ArgumentParser(description="measure the error rates of shoal compare")
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--slower", type=float, default=0.03, help="share of a step that is injected")
    parser.add_argument("--real", type=Path, help="train real models in turns instead, in this new directory")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of real runs, equal and slower ones")
    parser.add_argument("--steps", type=int, default=600, help="steps of a real run")
    args = parser.parse_args()
    if args.real is not None:
        print(real_table(args.real, args.steps, args.slower, args.pairs))
    else:
        print(table(args.repetitions, args.slower))
    return 0


if __name__ == "__main__":
    sys.exit(main())
