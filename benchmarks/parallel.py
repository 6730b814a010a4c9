"""The time of one optimizer step with a layer split over CPU ranks: Shoal, torch's own ways and plain loops.

    python benchmarks/parallel.py [--ranks 2] [--rounds 5] [--steps 5] [tensor] [context] [experts]

Three comparisons, one after another; each has one rank by itself. With tensor and context parallelism all
ranks take the same batch, with expert parallelism each its part. Contestants run in interleaved rounds
(`rounds.py`); medians over rounds with their range. The parallel efficiency of n ranks is the time of one
rank alone, over n times that of the n. The contestants of Shoal record every step, the timed ones too; a
second table says where these went (`shoal.spec.timeline.breakdown` defines the parts). Exits with 1 if a
contestant's losses are not those of one rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from contestants import Contestant, Task
from parallel_context import over_context_parallel, over_gathered, over_torch_ring
from parallel_dtensor import over_dtensor
from parallel_experts import over_all_to_all
from parallel_step import UntiedTask, alone, dealt, over_shoal
from rounds import Burst, Ranks, Spread, Step, interleave

from shoal.errors import WorkerError
from shoal.machine.bench import describe
from shoal.spec.timeline import Timeline, explain

__all__ = ["COMPARISONS", "Comparison", "breakdown_row", "main", "result_row"]

_WARM_UP = 3  # steps
_TOLERANCE = 1e-3  # relative: the order of sums differs, and steps multiply what that makes
_ALONE = "one rank"
_DIFFERS = "DIFFERS"
_RESULTS = ["", "step, ms", "range", "efficiency", "ratio", "range", "to", "peak RSS, MiB", "last loss"]
_BREAKDOWN = [
    "ms of a step",
    "compute",
    "exposed communication",
    "straggler wait",
    "other",
    "hidden communication",
    "exposed share",
    "MB",
]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Contestants that train the same.

    Attributes:
        task: What they train.
        preset: The model, by default.
        contestants: Each beside its peer, so that the two run one after the other.
    """

    task: type[Task]
    preset: str
    contestants: tuple[Contestant, ...]


_EXPERTS = partial(over_shoal, "dp={ranks},ep={ranks}", batches=dealt)

COMPARISONS: Mapping[str, Comparison] = {
    "tensor": Comparison(
        UntiedTask,
        "12m",
        (
            Contestant(_ALONE, alone, alone=True),
            Contestant("DTensor tp", partial(over_dtensor, "gloo", "plain"), _ALONE),
            Contestant("shoal tensor=plain", partial(over_shoal, "tp={ranks},tensor=plain"), "DTensor tp"),
            Contestant("DTensor tp and sequence", partial(over_dtensor, "gloo", "sequence"), _ALONE),
            Contestant(
                "shoal tensor=sequence",
                partial(over_shoal, "tp={ranks},tensor=sequence"),
                "DTensor tp and sequence",
            ),
            Contestant(
                "shoal tensor=async", partial(over_shoal, "tp={ranks},tensor=async"), "shoal tensor=sequence"
            ),
            Contestant("DTensor tp over shoal", partial(over_dtensor, "shoal", "plain"), "DTensor tp"),
        ),
    ),
    "context": Comparison(
        UntiedTask,
        "12m",
        (
            Contestant(_ALONE, alone, alone=True),
            Contestant("torch context_parallel", over_context_parallel, _ALONE),
            Contestant("torch ring by all-to-all", partial(over_torch_ring, "alltoall"), _ALONE),
            Contestant("torch ring by all-gather", partial(over_torch_ring, "allgather"), _ALONE),
            Contestant(
                "shoal context=ring",
                partial(over_shoal, "cp={ranks},context=ring"),
                "torch ring by all-gather",
            ),
            Contestant(
                "shoal context=ulysses",
                partial(over_shoal, "cp={ranks},context=ulysses"),
                "keys and values gathered",
            ),
            Contestant("keys and values gathered", over_gathered, _ALONE),
        ),
    ),
    "experts": Comparison(
        Task,
        "12m-experts",
        (
            Contestant(_ALONE, alone, alone=True),
            Contestant("all-to-all loop", partial(over_all_to_all, "gloo"), _ALONE),
            Contestant("shoal ep", _EXPERTS, "all-to-all loop"),
            Contestant("all-to-all loop over shoal", partial(over_all_to_all, "shoal"), "all-to-all loop"),
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    machine = describe()
    fails = False
    for name in options.comparisons or COMPARISONS:
        with tempfile.TemporaryDirectory() as folder:
            fails |= _compare(name, options, Path(folder))
    print(f"\n{machine}")
    return 1 if fails else 0


def _compare(name: str, options: argparse.Namespace, folder: Path) -> bool:
    """Runs a comparison and prints its tables; says whether a contestant's losses are not one rank's."""
    comparison = COMPARISONS[name]
    preset = options.preset or comparison.preset
    # One part of the batch: who deals it out does so by itself.
    task = comparison.task(preset, options.sequence, options.batch, 1, folder)
    wanted = options.only.split(",") if options.only else [each.name for each in comparison.contestants]
    chosen = [each for each in comparison.contestants if each.name in wanted]
    bursts, left_out = _race(chosen, task, options)
    rows = [result_row(each, bursts, options.ranks) for each in chosen if each.name in bursts]
    _print_table(_RESULTS, rows)
    print(
        f"\n{options.ranks} ranks of one thread, model {preset}, {options.batch} x {options.sequence} tokens "
        f"a step; medians and ranges of {options.rounds} rounds of {options.steps} steps"
    )
    for missing, reason in left_out.items():
        print(f"left out: {missing}: {reason}")
    recorded = [
        breakdown_row(each.name, Timeline.read(_folder(task, each)))
        for each in chosen
        if any(_folder(task, each).glob("rank-*.jsonl"))
    ]
    if recorded:
        print()
        _print_table(_BREAKDOWN, recorded)
    print()
    return any(row[-1] == _DIFFERS for row in rows)


def _race(
    chosen: Sequence[Contestant], task: Task, options: argparse.Namespace
) -> tuple[dict[str, list[Burst]], dict[str, str]]:
    """Lets contestants take their turns; gives the bursts of each, and why others are left out."""
    running: dict[str, Ranks] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        for each in chosen:
            own = replace(task, folder=_folder(task, each))
            own.folder.mkdir()
            ranks = Ranks(partial(_build, each, own), 1 if each.alone else options.ranks)
            stack.callback(ranks.close)
            try:
                ranks.run(_WARM_UP)
                running[each.name] = ranks
            except WorkerError as error:  # a peer that does not run here is named below the table
                left_out[each.name] = str(error).splitlines()[-1]
        bursts = interleave(running, options.rounds, options.steps, lambda text: print(text, file=sys.stderr))
    return bursts, left_out


def result_row(contestant: Contestant, bursts: Mapping[str, Sequence[Burst]], ranks: int) -> list[str]:
    """A row of the first table.

    Args:
        contestant: One that ran.
        bursts: Of all that ran, by round.
        ranks: How many the contestant has.
    """
    times = {name: [median(burst.seconds) for burst in turns] for name, turns in bursts.items()}
    own, last = times[contestant.name], bursts[contestant.name][-1]
    spread, loss = Spread.of(own), last.losses[-1]
    efficiency = ratio = ratio_range = peer = ""
    differs = False
    if _ALONE in times and not contestant.alone:
        efficiency = f"{median(times[_ALONE]) / median(own) / ranks:.2f}"
        differs = abs(loss - bursts[_ALONE][-1].losses[-1]) > _TOLERANCE * abs(loss)
    if contestant.peer in times:
        peer = contestant.peer
        ratios = Spread.of([mine / theirs for mine, theirs in zip(own, times[peer], strict=True)])
        ratio, ratio_range = f"{ratios.median:.3f}", f"{ratios.low:.3f} to {ratios.high:.3f}"
    return [
        contestant.name,
        f"{spread.median * 1e3:.1f}",
        f"{spread.low * 1e3:.1f} to {spread.high * 1e3:.1f}",
        efficiency,
        ratio,
        ratio_range,
        peer,
        f"{last.peak_bytes / 2**20:.0f}",
        _DIFFERS if differs else f"{loss:.4f}",
    ]


def breakdown_row(name: str, timeline: Timeline) -> list[str]:
    """A row of the second table: the mean over ranks of where their typical steps went, in ms."""
    parts = explain(timeline).parts
    shown = (
        parts.compute,
        parts.exposed_communication,
        parts.straggler_wait,
        parts.data_wait + parts.bubble + parts.other,
        parts.overlapped_communication,
    )
    share = parts.exposed_communication / parts.wall
    return [name, *(f"{each * 1e3:.1f}" for each in shown), f"{share:.1%}", f"{parts.bytes / 1e6:.1f}"]


def _print_table(header: list[str], rows: Sequence[list[str]]) -> None:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    print("\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows)))


def _folder(task: Task, contestant: Contestant) -> Path:
    return task.folder / contestant.name


def _build(contestant: Contestant, task: Task, rank: int) -> Step:
    return contestant.build(task, rank)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "comparisons", nargs="*", metavar="NAME", help=f"of {', '.join(COMPARISONS)} (default all)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--steps", type=int, default=5, help="of each in a round (default 5)")
    parser.add_argument("--preset", default="", help="of shoal.models (default 12m, or 12m-experts)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step (default 4)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="some of the contestants")
    options = parser.parse_args(arguments)
    if unknown := set(options.comparisons) - set(COMPARISONS):
        parser.error(f"no comparison {', '.join(sorted(unknown))}; there are {', '.join(COMPARISONS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
