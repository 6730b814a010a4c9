"""Pipelines: Shoal's schedules beside torch's, measured steps beside their tables, memory, and balance.

    python benchmarks/pipeline.py [--ranks 2] [--rounds 5] [--steps 2] [schedules] [balance] [memory]

schedules   Each schedule that torch has too, over gloo as its users run it, beside Shoal's over the backend
            `shoal` and over gloo; same model, stages and micro-batches. Contestants run in interleaved rounds
            (`rounds.py`), some schedules at a time; medians over rounds with their range. A second table has
            the steps of Shoal beside what their tables give with the measured times (`pipeline_played.py`).
balance     Blocks dealt out by cost and by count, on a model whose head takes as much as eight blocks and on
            one whose blocks widen; how much faster the step is, and how much faster it should be: by FLOP,
            before anything runs, and by the measured times of the stages.
memory      What the ranks of a pipeline of four hold, beside what the table says (`pipeline_memory.py`).

Exits with 1 if a contestant's losses are not those of one rank, or memory departs by more than a tenth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from contestants import Contestant
from parallel import result_row
from pipeline_memory import MEMORY_SHAPE, memory_rows
from pipeline_played import PlayedStep, median_times, played_steps, spread_of
from pipeline_step import MODELS, TORCH_SCHEDULES, PipelineTask, alone, over_pipeline, over_torch
from rounds import Burst, Ranks, Spread, Step, interleave

from shoal.errors import WorkerError
from shoal.machine.bench import describe
from shoal.parallel.pipeline.pieces import computed_costs, cut_pieces
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import Times, play
from shoal.spec.timeline import Timeline
from shoal.testing import RankPool

__all__ = ["PARTS", "Entry", "balance_row", "entries", "flop_times", "main", "played_row"]

PARTS = ("schedules", "balance", "memory")

_WARM_UP = 2  # steps
_ALONE = "one rank"
_DIFFERS = "DIFFERS"
_GROUPS = (("gpipe", "1f1b"), ("interleaved", "looped-bfs"), ("zb-h1", "zb-v", "dualpipe-v"))
"""Schedules whose contestants run in the same rounds; all at once would take too much memory."""
_MEMORY = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
_UNEVEN = tuple(name for name in MODELS if name != "even")

_RESULTS = ["", "step, ms", "range", "efficiency", "ratio", "range", "to", "peak RSS, MiB", "last loss"]
_PLAYED = [
    "",
    "F to last B, ms",
    "by the table",
    "ratio",
    "range",
    "bubble",
    "by the table",
    "each action by itself",
    "with equal stages",
    "between actions",
    "message, us",
    "rest of the step, ms",
]
_BALANCE = [
    "",
    "by count, ms",
    "by cost, ms",
    "ratio",
    "range",
    "by stage times",
    "by FLOP",
    "blocks by cost",
]
_HELD = ["schedule", "rank", "micro-batches", "held, MiB", "by the table", "ratio", "peak, MiB"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant, and the Plan that it runs.

    Attributes:
        contestant: See there.
        plan: Its text form, with `{ranks}` for their number.
    """

    contestant: Contestant
    plan: str


def entries(schedules: Sequence[str]) -> list[Entry]:
    """Torch's, Shoal's and Shoal's over gloo for each schedule, each beside its peer."""
    found = []
    for name in schedules:
        plan = f"pp={{ranks}},schedule={name}"
        theirs, ours = f"torch {name}", f"shoal {name}"
        for contestant in (
            Contestant(theirs, partial(over_torch, plan, "gloo"), _ALONE),
            Contestant(ours, partial(over_pipeline, plan, "shoal"), theirs),
            Contestant(f"{ours} over gloo", partial(over_pipeline, plan, "gloo"), theirs),
        ):
            found.append(Entry(contestant, plan))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    machine = describe()
    run: Mapping[str, Callable[[argparse.Namespace, Path], bool]] = {
        "schedules": _schedules,
        "balance": _balance,
        "memory": _memory,
    }
    fails = False
    for part in options.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            fails |= run[part](options, Path(folder))
        print(flush=True)
    print(machine)
    return 1 if fails else 0


# -- schedules ------------------------------------------------------------------------------------------


def _schedules(options: argparse.Namespace, folder: Path) -> bool:
    task = _task("even", options, folder)
    wanted = options.only.split(",") if options.only else list(TORCH_SCHEDULES)
    first = [Entry(Contestant(_ALONE, alone, alone=True), "pp=1")]
    chosen, bursts = [], {}
    for group in _GROUPS:
        racing = first + entries([name for name in group if name in wanted])
        if len(racing) > len(first):
            bursts |= _race(racing, task, options)
            chosen += racing
            first = []
    rows = [
        result_row(entry.contestant, bursts, options.ranks)
        for entry in chosen
        if entry.contestant.name in bursts
    ]
    _print_table(_RESULTS, rows)
    print(
        f"\n{options.ranks} ranks of one thread, {_described(task)}; medians and ranges of "
        f"{options.rounds} rounds of {options.steps} steps\n"
    )
    if {"shoal gpipe", "shoal 1f1b"} <= set(bursts):
        spread = _ratio(bursts["shoal 1f1b"], bursts["shoal gpipe"])
        print(f"shoal 1f1b over shoal gpipe: {spread.median:.3f}, {spread.low:.3f} to {spread.high:.3f}\n")
    table = []
    for entry in chosen:
        own = _folder(task, entry)
        if any(own.glob("rank-*.jsonl")):
            plan = Plan.parse(entry.plan.format(ranks=options.ranks))
            timeline, schedule = Timeline.read(own), plan.schedule_for(task.micro_batches)
            table.append(played_row(entry.contestant.name, played_steps(timeline, schedule, _WARM_UP)))
    _print_table(_PLAYED, table)
    return any(row[-1] == _DIFFERS for row in rows)


def played_row(name: str, steps: Sequence[PlayedStep]) -> list[str]:
    """A row of the second table: medians over steps, beside what the table gives for each."""
    ratio = spread_of(steps, "ratio")
    schedule, times = steps[0].played.schedule, median_times(steps)
    mean = [sum(each) / schedule.stages for each in (times.forward, times.input, times.weight)]
    equal = play(schedule, Times.equal(schedule.stages, *mean))
    messages = [each for each in times.transfer if each > 0]
    return [
        name,
        f"{spread_of(steps, 'seconds').median * 1e3:.1f}",
        f"{median(step.played.makespan for step in steps) * 1e3:.1f}",
        f"{ratio.median:.3f}",
        f"{ratio.low:.3f} to {ratio.high:.3f}",
        f"{spread_of(steps, 'bubble').median:.1%}",
        f"{median(step.played.bubble for step in steps):.1%}",
        f"{spread_of(steps, 'unequal_bubble').median:.1%}",
        f"{equal.bubble:.1%}",
        f"{spread_of(steps, 'between').median:.1%}",
        f"{median(messages) * 1e6:.0f}" if messages else "",
        f"{median(step.whole - step.seconds for step in steps) * 1e3:.1f}",
    ]


# -- balance --------------------------------------------------------------------------------------------


def _balance(options: argparse.Namespace, folder: Path) -> bool:
    rows, results = [], []
    for model in _UNEVEN:
        task = _task(model, options, folder / model)
        task.folder.mkdir()
        first = Entry(Contestant(_ALONE, alone, alone=True), "pp=1")
        by_count, by_cost = (_split_entry(split) for split in ("count", "cost"))
        bursts = _race([first, by_count, by_cost], task, options)
        steps = {}
        for entry in (by_count, by_cost):
            plan = Plan.parse(entry.plan.format(ranks=options.ranks))
            timeline = Timeline.read(_folder(task, entry))
            schedule = plan.schedule_for(task.micro_batches)
            steps[entry.contestant.name] = played_steps(timeline, schedule, _WARM_UP)
        rows.append(balance_row(task, bursts, steps, options.ranks))
        results += [result_row(entry.contestant, bursts, options.ranks) for entry in (by_count, by_cost)]
    _print_table(_BALANCE, rows)
    print(
        f"\n1f1b on {options.ranks} ranks of one thread over `shoal`; "
        + "; ".join(_described(_task(model, options, folder)) for model in _UNEVEN)
    )
    return any(row[-1] == _DIFFERS for row in results)


def _split_entry(split: str) -> Entry:
    plan = f"pp={{ranks}},schedule=1f1b,split={split}"
    return Entry(Contestant(f"split={split}", partial(over_pipeline, plan, "shoal"), _ALONE), plan)


def balance_row(
    task: PipelineTask,
    bursts: Mapping[str, Sequence[Burst]],
    steps: Mapping[str, Sequence[PlayedStep]],
    ranks: int,
) -> list[str]:
    """How much longer a step takes that is split by count, measured and as it should be.

    Args:
        task: What was trained.
        bursts: By round, of `split=count` and `split=cost`.
        steps: Of both, as they were recorded.
        ranks: Of each.
    """
    count, cost = bursts["split=count"], bursts["split=cost"]
    ratio = _ratio(count, cost)
    by_times = _predicted(steps["split=count"]) / _predicted(steps["split=cost"])
    by_flop = _flop_makespan(task, "count", ranks) / _flop_makespan(task, "cost", ranks)
    with torch.device("meta"):
        pieces = cut_pieces(task.empty_model(), Plan(pp=ranks, split="cost"))
    return [
        task.preset,
        f"{median(map(_seconds, count)) * 1e3:.1f}",
        f"{median(map(_seconds, cost)) * 1e3:.1f}",
        f"{ratio.median:.3f}",
        f"{ratio.low:.3f} to {ratio.high:.3f}",
        f"{by_times:.3f}",
        f"{by_flop:.3f}",
        "-".join(str(len(pieces.blocks_of(stage))) for stage in range(ranks)),
    ]


def flop_times(task: PipelineTask, plan: Plan) -> Times:
    """The stages' times in FLOP for one token, without messages."""
    with torch.device("meta"):
        model = task.empty_model()
    pieces = cut_pieces(model, plan)
    costs = computed_costs(model, pieces.layout)
    forward = tuple(sum(costs[piece].forward for piece in each) for each in pieces.ranges)
    return Times(forward, forward, forward, (0.0,) * (plan.stages - 1))


def _flop_makespan(task: PipelineTask, split: str, ranks: int) -> float:
    plan = Plan(pp=ranks, split=split)
    return play(plan.schedule_for(task.micro_batches), flop_times(task, plan)).makespan


def _predicted(steps: Sequence[PlayedStep]) -> float:
    """Seconds of a step: its table with the measured times, and what comes after the last action."""
    return median(step.played.makespan + step.whole - step.seconds for step in steps)


# -- memory ---------------------------------------------------------------------------------------------


def _memory(options: argparse.Namespace, folder: Path) -> bool:
    plans = [f"pp=4,schedule={name}" for name in _MEMORY]
    with RankPool("shoal") as pool:
        found = list(memory_rows(pool, plans, options.micro_batches))
    _print_table(_HELD, [row for row, _ in found])
    shape = MEMORY_SHAPE
    print(
        f"\npp=4, {options.micro_batches} micro-batches of 1 x {shape.seq} tokens; {shape.layers} blocks, "
        f"hidden {shape.hidden}, feed-forward {shape.ffn}, vocabulary {shape.vocab_size}; over `shoal`"
    )
    return not all(is_near for _, is_near in found)


# -- in common ------------------------------------------------------------------------------------------


def _task(model: str, options: argparse.Namespace, folder: Path) -> PipelineTask:
    batch = options.microbatch * options.micro_batches
    return PipelineTask(model, options.sequence, batch, 1, folder, options.micro_batches)


def _described(task: PipelineTask) -> str:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in task.empty_model().parameters())
    size = task.microbatch // task.micro_batches
    return (
        f"model {task.preset} ({count / 1e6:.1f} M parameters), {task.micro_batches} micro-batches of "
        f"{size} x {task.sequence} tokens"
    )


def _race(racing: Sequence[Entry], task: PipelineTask, options: argparse.Namespace) -> dict[str, list[Burst]]:
    """Lets contestants take their turns; gives the bursts of each that runs here."""
    running: dict[str, Ranks] = {}
    with ExitStack() as stack:
        for entry in racing:
            each = entry.contestant
            own = replace(task, folder=_folder(task, entry))
            own.folder.mkdir()
            ranks = Ranks(partial(_build, each, own), 1 if each.alone else options.ranks)
            stack.callback(ranks.close)
            running[each.name] = ranks
        for name in list(running):
            try:
                running[name].run(_WARM_UP)
            except WorkerError as error:  # a peer that does not run here
                print(f"left out: {name}: {str(error).splitlines()[-1]}", file=sys.stderr)
                del running[name]
        return interleave(running, options.rounds, options.steps, lambda text: print(text, file=sys.stderr))


def _ratio(ours: Sequence[Burst], theirs: Sequence[Burst]) -> Spread:
    """Of the times of steps, round by round."""
    return Spread.of([_seconds(mine) / _seconds(other) for mine, other in zip(ours, theirs, strict=True)])


def _seconds(burst: Burst) -> float:
    return median(burst.seconds)


def _folder(task: PipelineTask, entry: Entry) -> Path:
    return task.folder / entry.contestant.name


def _build(contestant: Contestant, task: PipelineTask, rank: int) -> Step:
    return contestant.build(task, rank)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    print("\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows)), flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--steps", type=int, default=2, help="of each in a round (default 2)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--microbatch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument("--micro-batches", type=int, default=8, help="in a step (default 8)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="some of the schedules")
    options = parser.parse_args(arguments)
    for what, known in ((options.parts, PARTS), (filter(None, options.only.split(",")), TORCH_SCHEDULES)):
        if unknown := set(what) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
