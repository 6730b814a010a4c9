"""What recording costs a training step of about 100 ms: one Trainer, whose steps are recorded or not in turn.

    python benchmarks/recording.py [--rounds 10] [--steps 40] [--shard none] [--sequence 64]

The recorder is switched between steps, in the order on, off, off, on, so that nothing else can differ. A
round's ratio is that of the mean times, since writing the spans out, once a second, falls to few steps.
`recorder.py` measures the single span.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, final

from contestants import Task, make_trainer
from rounds import Ranks, Spread, Step

from shoal.machine.bench import describe
from shoal.record import NullRecorder, OpenSpan, Recorder, SpanRecorder

__all__ = ["Switch"]

_WARM_UP = 4  # steps; a multiple of the pattern's four, as the rounds are


@final
class Switch(Recorder):
    """Pass everything on to the recorder that is chosen.

    Attributes:
        chosen: The recorder.
        first: Number that is taken from the numbers of steps.
    """

    def __init__(self, chosen: Recorder) -> None:
        self.chosen = chosen
        self.first = 0

    def span(self, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        """See `Recorder.span`."""
        return self.chosen.span(*arguments, **named)

    def open(self, *arguments: Any, **named: Any) -> OpenSpan:
        """See `Recorder.open`."""
        return self.chosen.open(*arguments, **named)

    def step(self, index: int) -> AbstractContextManager[None]:
        """See `Recorder.step`."""
        return self.chosen.step(index - self.first)

    def close(self) -> None:
        """See `Recorder.close`."""
        self.chosen.close()


@dataclass(frozen=True, slots=True)
class _Build:
    """The step of a rank, recorded where `_is_recorded` says so."""

    task: Task
    shard: str

    def __call__(self, rank: int) -> Step:
        on, off = SpanRecorder(self.task.folder / f"rank-{rank}.jsonl", rank), NullRecorder()
        switch = Switch(off)
        trainer = make_trainer(self.task, self.shard, switch)

        def step() -> float:
            switch.chosen = on if _is_recorded(trainer.step_count) else off
            return trainer.step().loss

        return step


def _is_recorded(step: int) -> bool:
    return step % 4 in (0, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--rounds", type=int, default=10, help="default 10")
    parser.add_argument("--steps", type=int, default=40, help="in a round, a multiple of 4 (default 40)")
    parser.add_argument("--shard", default="none", help="none, zero1, zero2 or zero3 (default none)")
    parser.add_argument("--sequence", type=int, default=64, help="tokens a rank and step (default 64)")
    options = parser.parse_args()
    if options.steps < 4 or options.steps % 4:
        parser.error(f"--steps {options.steps} is not a multiple of 4: on, off, off, on")

    machine = describe()
    means: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        task = Task("12m", options.sequence, 1, options.ranks, Path(folder))
        with Ranks(_Build(task, options.shard), options.ranks) as ranks:
            ranks.run(_WARM_UP)
            for index in range(options.rounds):
                print(f"round {index + 1} of {options.rounds}", file=sys.stderr)
                seconds = ranks.run(options.steps).seconds
                for recorded, values in means.items():
                    values.append(
                        fmean(time for step, time in enumerate(seconds) if _is_recorded(step) is recorded)
                    )
    ratios = [on / off for on, off in zip(means[True], means[False], strict=True)]
    for name, values, scale, unit in (
        ("recording on", means[True], 1e3, " ms"),
        ("recording off", means[False], 1e3, " ms"),
        ("ratio", ratios, 1, ""),
    ):
        spread = Spread.of([scale * value for value in values])
        print(f"{name:<14}{spread.median:9.4f}{unit}, {spread.low:.4f} to {spread.high:.4f}{unit}")
    print(
        f"\n{options.ranks} ranks of one thread, shard={options.shard}; medians and ranges of "
        f"{options.rounds} rounds of {options.steps} steps, every other one recorded\n{machine}"
    )


if __name__ == "__main__":
    main()
