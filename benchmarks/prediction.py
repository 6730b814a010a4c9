"""Predicted beside measured: the time of a step under many Plans, on this machine, from `shoal probe` alone.

    python benchmarks/prediction.py [--ranks 2,4] [--rounds 5] [--steps 3] [--out benchmarks/prediction.md]

For each number of ranks the machine is probed with as many, which says what a rank reaches when all are busy;
then every Plan's step is predicted, and measured in interleaved rounds (`rounds.py`), a few Plans at a time,
as the processes of all of them wake up often enough to take a tenth of the cores. No measured step takes part
in the predictions. A machine that others use too is quicker at one minute than at another: before and after
the probe, and before and after each turn of a Plan, all ranks do the same products and passes, and measured
seconds are those at the probe's pace.

The page has each Plan's predicted and measured seconds and the error, the median of the errors, and Kendall's
tau of the order within a number of ranks: of all pairs of Plans that train the same model, the share that the
prediction orders as the measurement does, less the share that it does not.

Beside it stands the error that is left when the Cluster is corrected by what each model's first Plan recorded
(`shoal calibrate`), and its median over the other Plans. That was not recorded at the probe's pace: what
follows from it is told at the probe's, too.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
import torch.distributed as dist
from contestants import Task
from rounds import Ranks, Spread, Step

import shoal
from shoal.machine.bench import describe
from shoal.models import Transformer, TransformerConfig
from shoal.predict.cost import calibrate
from shoal.predict.cost.outlook import Observation
from shoal.predict.cost.time import workload_on
from shoal.predict.simulate import simulate
from shoal.record import SpanRecorder
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.timeline import Timeline
from shoal.spec.workload import Workload, transformer_shape

__all__ = ["PLANS", "SHAPES", "Case", "Row", "kendall_tau", "main", "predicted_seconds", "workload_of_case"]

_WARM_UP = 2  # steps
_AT_ONCE = 3  # Plans whose ranks live at the same time
_PACES = 10  # times that the pace is taken: half a second
_PASSED = 8 << 20  # numbers that the pace passes over

SHAPES: Mapping[str, TransformerConfig] = {
    "dense": TransformerConfig(
        vocab_size=256, layers=8, hidden=256, heads=4, kv_heads=4, ffn=1024, seq=128, tie_embeddings=False
    ),
    "experts": TransformerConfig(
        vocab_size=256,
        layers=4,
        hidden=256,
        heads=4,
        kv_heads=4,
        ffn=1024,
        seq=128,
        tie_embeddings=False,
        experts=4,
        experts_per_token=2,
        expert_ffn=512,
    ),
}
"""What is trained, by name."""

_BATCH = 16
_DENSE = {
    2: (
        "dp=2",
        "dp=2,microbatch=1",
        "dp=2,recompute=full",
        "dp=2,shard=zero1",
        "dp=2,shard=zero2",
        "dp=2,shard=zero2,microbatch=2",
        "dp=2,shard=zero3",
        "dp=2,shard=zero3,microbatch=2",
        "dp=2,shard=zero3,recompute=full,microbatch=1",
        "tp=2",
        "tp=2,tensor=plain",
        "tp=2,recompute=full,microbatch=4",
        "cp=2",
        "cp=2,context=ulysses",
        "pp=2,microbatch=1",
        "pp=2,microbatch=2",
        "pp=2,microbatch=4",
        "pp=2,schedule=zb-h1,microbatch=2",
        "pp=2,schedule=interleaved,microbatch=2",
        "pp=2,schedule=gpipe,recompute=full,microbatch=4",
    ),
    4: (
        "dp=4",
        "dp=4,microbatch=1",
        "dp=4,shard=zero3",
        "dp=4,recompute=full",
        "dp=4,shard=zero3,recompute=full,microbatch=1",
        "dp=2,tp=2",
        "dp=2,tp=2,shard=zero2",
        "dp=2,cp=2",
        "dp=2,pp=2,microbatch=2",
        "dp=2,pp=2,recompute=full,microbatch=2",
        "tp=2,pp=2,microbatch=2",
        "pp=4,microbatch=2",
        "pp=4,recompute=full,microbatch=1",
    ),
}
_EXPERTS = {
    2: ("dp=2", "dp=2,ep=2", "dp=2,shard=zero1,ep=2"),
    4: ("dp=4,ep=4", "dp=2,tp=2,ep=2"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a Plan."""

    model: str
    plan: str

    def __str__(self) -> str:
        return f"{self.model}: {self.plan}"


PLANS: Mapping[int, tuple[Case, ...]] = {
    ranks: (
        *(Case("dense", plan) for plan in _DENSE[ranks]),
        *(Case("experts", plan) for plan in _EXPERTS[ranks]),
    )
    for ranks in _DENSE
}
"""What is predicted and measured, by the number of ranks."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the page has of a case; seconds of a step.

    Attributes:
        ranks: Number of ranks.
        case: The model and its Plan.
        predicted: From the probe alone.
        calibrated: After the model's first Plan was measured.
        measured: In all rounds.
    """

    ranks: int
    case: Case
    predicted: float
    calibrated: float
    measured: Spread

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measured seconds."""
        return self.predicted / self.measured.median - 1

    @property
    def error_left(self) -> float:
        """The same of the prediction after calibration."""
        return self.calibrated / self.measured.median - 1


class _Round(NamedTuple):
    """One round of a case.

    Attributes:
        seconds: Of a step, the median.
        pace: That of the minute, over the probe's.
    """

    seconds: float
    pace: float


def workload_of_case(case: Case, cluster: Cluster) -> Workload:
    """What the case's model does."""
    return workload_on(cluster, transformer_shape(SHAPES[case.model].model_dump(), case.model))


def predicted_seconds(case: Case, cluster: Cluster) -> float:
    """Of a step."""
    return simulate(workload_of_case(case, cluster), cluster, Plan.parse(case.plan), _BATCH).seconds


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Of two orders of the same things: 1 where they agree, -1 where one is the other's reverse.

    >>> kendall_tau([(1.0, 10.0), (2.0, 20.0), (3.0, 15.0)])
    0.3333333333333333
    """
    compared = [
        (first[0] - second[0]) * (first[1] - second[1]) for first, second in itertools.combinations(pairs, 2)
    ]
    return sum((each > 0) - (each < 0) for each in compared) / len(compared)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    machine = describe()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            cases = [case for case in PLANS[ranks] if options.only in str(case)]
            with Ranks(_build_pace, ranks) as pace:
                pace.run(_PACES)
                cluster, usual = _probed(ranks, Path(folder), pace, quick=options.quick)
                measured = _measured(cases, pace, usual, ranks, Path(folder), options)
            firsts = {case.model: case for case in reversed(cases)}
            calibrated = {model: _calibrated(case, cluster, Path(folder)) for model, case in firsts.items()}
            for case in cases:
                at_pace = [each.seconds * each.pace for each in measured[case]]
                pace_then = median(each.pace for each in measured[firsts[case.model]])
                predicted = predicted_seconds(case, cluster)
                after = predicted_seconds(case, calibrated[case.model]) * pace_then
                rows.append(Row(ranks, case, predicted, after, Spread.of(at_pace)))
    page = f"{_page(rows)}\n{machine}\n"
    print(page)
    if options.out is not None:
        options.out.write_text(f"{_HEAD}\n{page}", encoding="utf-8")
    return 0


def _probed(ranks: int, folder: Path, pace: Ranks, *, quick: bool) -> tuple[Cluster, float]:
    """What the probe wrote, and the pace's seconds around it."""
    file = folder / f"{ranks}.toml"
    command = [sys.executable, "-m", "shoal.cli.main", "probe", f"--ranks={ranks}", f"--out={file}"]
    before = _seconds(pace)
    subprocess.run([*command, *(["--quick"] if quick else [])], check=True, stdout=sys.stderr)
    return Cluster.read(file), fmean([before, _seconds(pace)])


def _measured(
    cases: Sequence[Case], pace: Ranks, usual: float, ranks: int, folder: Path, options: argparse.Namespace
) -> dict[Case, list[_Round]]:
    """By case, each round."""
    rounds: dict[Case, list[_Round]] = {case: [] for case in cases}
    for first in range(0, len(cases), _AT_ONCE):
        with ExitStack() as stack:
            running = {}
            for case in cases[first : first + _AT_ONCE]:
                _say(f"starting {case}")
                running[case] = stack.enter_context(Ranks(partial(_build, case, folder), ranks))
                running[case].run(_WARM_UP)
            for index in range(options.rounds):
                for case in reversed(list(running)) if index % 2 else running:
                    before = _seconds(pace)
                    step = median(running[case].run(options.steps).seconds)
                    rounds[case].append(_Round(step, usual / fmean([before, _seconds(pace)])))
    return rounds


def _seconds(pace: Ranks) -> float:
    return median(pace.run(_PACES).seconds)


def _build_pace(rank: int) -> Step:
    """Products and passes, in the proportion of a step."""
    given, weight = torch.randn(1024, 256), torch.randn(256, 1024)
    stream = torch.randn(_PASSED)

    def step() -> float:
        for _ in range(6):
            torch.mm(given, weight)
        stream.mul_(1.0)
        return 0.0

    return step


def _calibrated(case: Case, cluster: Cluster, folder: Path) -> Cluster:
    """The Cluster, corrected by what the ranks of a case recorded."""
    timeline = Timeline.read(_recorded(case, cluster.devices, folder))
    plan = SettledPlan.of(Plan.parse(case.plan), _BATCH)
    return calibrate(
        cluster, [Observation.of(workload_of_case(case, cluster), plan, _BATCH, timeline)]
    ).cluster


def _recorded(case: Case, ranks: int, folder: Path) -> Path:
    """Where the ranks of a case record."""
    return folder / f"{ranks}-{case.model}-{case.plan}"


def _build(case: Case, folder: Path, rank: int) -> Step:
    """The step of a rank, as `shoal train` makes it."""
    dist.init_process_group("shoal")
    own = _recorded(case, dist.get_world_size(), folder)
    own.mkdir(exist_ok=True)
    config = SHAPES[case.model]
    task = Task("", config.seq, _BATCH, 1, folder)
    model = Transformer(config)
    model.initialize(0)
    trainer = shoal.Trainer(
        model,
        task.samples(),
        case.plan,
        batch=_BATCH,
        steps=1_000_000,
        runtime=shoal.train.Runtime(recorder=SpanRecorder(own / f"rank-{rank}.jsonl", rank)),
    )
    return lambda: trainer.step().loss


def _page(rows: Sequence[Row]) -> str:
    lines = [
        "| ranks | model | Plan | predicted, ms | measured, ms | range | error | calibrated |",
        "| ---: | --- | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for row in rows:
        measured = row.measured
        lines.append(
            f"| {row.ranks} | {row.case.model} | `{row.case.plan}` | {row.predicted * 1e3:.1f} "
            f"| {measured.median * 1e3:.1f} | {measured.low * 1e3:.1f} to {measured.high * 1e3:.1f} "
            f"| {row.error:+.1%} | {row.error_left:+.1%} |"
        )
    lines.append("")
    for ranks in sorted({row.ranks for row in rows}):
        lines.append(f"- {ranks} ranks: {_summary([row for row in rows if row.ranks == ranks])}")
    lines.append(f"- all: {_errors(rows)}")
    return "\n".join([*lines, ""])


def _summary(rows: Sequence[Row]) -> str:
    dense = [(row.predicted, row.measured.median) for row in rows if row.case.model == "dense"]
    order = f"; Kendall's tau of the dense model's {kendall_tau(dense):.2f}" if len(dense) > 1 else ""
    return f"{_errors(rows)}{order}"


def _errors(rows: Sequence[Row]) -> str:
    firsts = {(row.ranks, row.case.model): row for row in reversed(rows)}  # whose times the calibration knows
    others = [abs(row.error_left) for row in rows if row not in firsts.values()]
    left = f", calibrated {median(others):.1%}" if others else ""
    return f"median error {median(abs(row.error) for row in rows):.1%}{left}"


_HEAD = """\
# Predicted and measured steps

What `shoal probe` alone predicts, beside what was measured (`prediction.py`); and the error that is left when
the Cluster was corrected by the first Plan of each model and number of ranks (`shoal calibrate`).
"""


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--steps", type=int, default=3, help="of each in a round (default 3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--quick", action="store_true", help="probe quickly")
    parser.add_argument("--out", type=Path, help="also write the page, such as benchmarks/prediction.md")
    options = parser.parse_args(arguments)
    options.ranks = [int(each) for each in options.ranks.split(",")]
    return options


if __name__ == "__main__":
    sys.exit(main())
