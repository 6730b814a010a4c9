"""`shoal schedule`: a pipeline schedule to scale, with its bubble and activations, or all side by side."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

from shoal.cli.model_stages import ModelStages, add_model, open_model
from shoal.cli.table import as_json, table_of, write_text
from shoal.errors import PlanError
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import FOUND, NAMES, Played, Schedule, Times, kind_of, make, play, search
from shoal.spec.plan.schedules.draw import draw, picture
from shoal.units import format_bytes

_WIDTH_OF_FILES = 160  # columns of a picture where there is no terminal

_DESCRIPTION = f"""\
Draws a pipeline schedule to scale, with its bubble and the activations that each rank holds. F is a forward,
B a backward; I and W are the two halves of a backward: the gradient of the input and of the weights. Numbers
are micro-batches; small letters mark the second stage of a rank. Idle is all time in which a rank does not
work, until the last rank stops; stalled is the part between the rank's own first and last action.

Names: {", ".join((*NAMES, FOUND))}.
{FOUND} finds a schedule for the given times and limit that is never worse than the others. Times are for all
layers of a rank; each stage of a rank takes its share. With --model, the stages are those of a model, split
by the costs of its blocks, and the Plan with that split is printed. Computed costs are in units of a rank's
mean forward, measured costs in seconds. {FOUND} is then the schedule that the Plan trains with: for computed
costs, and within --limit, or what 1f1b holds.

Exit codes: 0 drawn; 2 wrong input.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = _DESCRIPTION
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--name", metavar="NAME", help="the schedule, such as zb-v (default 1f1b)")
    which.add_argument("--compare", action="store_true", help="all schedules, side by side")
    parser.add_argument("--pp", metavar="N", type=int, required=True, help="ranks of the pipeline")
    parser.add_argument(
        "--microbatches", metavar="N", type=int, help="micro-batches in a step (default: four for each rank)"
    )
    parser.add_argument(
        "--virtual",
        metavar="N",
        type=int,
        help="stages on a rank (default: the fewest that the schedule takes; 2 for search and looped-bfs)",
    )
    parser.add_argument(
        "--times",
        metavar="F,B,W",
        help="times of forward, gradient of the input and gradient of the weights, for one micro-batch "
        "(default 1,1,1)",
    )
    parser.add_argument(
        "--transfer", metavar="T", type=float, default=0.0, help="time of a message between ranks (default 0)"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=float,
        help="activations that a rank may hold, in micro-batches; may be a fraction, such as 4.5",
    )
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also draw it into a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Print the schedule, or the comparison of all schedules.

    Raises:
        PlanError: A name, a number or a time is not valid, or the schedule exceeds the limit.
        UserError: The picture cannot be written, or the model cannot be cut or measured.
    """
    _require_together(args)
    name = "1f1b" if args.name is None else args.name
    if args.microbatches is None:
        args.microbatches = 4 * args.pp
    _make(args, "looped-bfs" if args.compare else name)  # checks the numbers before anything is built
    model = None if args.model is None else open_model(args, partial(_limit, args.limit))
    stages = _EqualStages(args) if model is None else model
    played = _compared(args, stages) if args.compare else [_played(args, name, stages)]
    if args.svg is not None:
        write_text("picture", args.svg, "--svg", draw(played))
    if args.json:
        summaries = [_summary(each, model) for each in played]
        print(as_json({"schedules": summaries} if args.compare else summaries[0]))
    elif args.compare:
        print(_comparison(played, model))
    else:
        print("\n\n".join([_text(played[0]), *([] if model is None else [_cut_text(played[0], model)])]))
    return 0


def _require_together(args: argparse.Namespace) -> None:
    """Check that the options fit together, with a model or without."""
    for option, is_given, with_model in (
        ("--times", args.times is not None, False),
        ("--measure", args.measure, True),
        ("--memory", args.memory is not None, True),
        ("--option", bool(args.option), True),
    ):
        if is_given and with_model != (args.model is not None):
            raise PlanError(
                f"{option} was given {'without' if with_model else 'with'} --model",
                possible="--times without --model, or --model with its options; its costs give the times",
                change=f"leave out {option}" + (", or add --model" if with_model else ""),
            )
    if args.recompute != "none" and not (args.measure or args.memory):
        raise PlanError(
            f"--recompute {args.recompute} was given without --measure",
            possible="--recompute with --measure or --memory; computed costs do not include recomputation",
            change="add --measure",
        )


class _Stages(Protocol):
    """The stages that schedules are shown for."""

    def found(self, ranks: int, virtual: int, microbatches: int) -> Schedule:
        """Return the schedule that search finds."""
        ...

    def times(self, schedule: Schedule) -> Times:
        """Return the times of the stages of a schedule."""
        ...


@final
class _EqualStages:
    """Stages that all take equal times."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._times = _times("1,1,1" if args.times is None else args.times)
        self._transfer = args.transfer
        self._limit = args.limit

    def found(self, ranks: int, virtual: int, microbatches: int) -> Schedule:
        times = self._of(ranks * virtual, virtual)
        return search(times, ranks, virtual, microbatches, _limit(self._limit, virtual))

    def times(self, schedule: Schedule) -> Times:
        return self._of(schedule.stages, schedule.virtual)

    def _of(self, stages: int, virtual: int) -> Times:
        forward, input, weight = (each / virtual for each in self._times)
        return Times.equal(stages, forward, input, weight, self._transfer)


def _times(text: str) -> tuple[float, float, float]:
    try:
        forward, input, weight = map(float, text.split(","))
    except ValueError:
        raise PlanError(
            f"--times {text} cannot be read",
            possible="three numbers with commas between them: forward, gradient of the input, of the weights",
            change="write --times 1,1,1, say",
        ) from None
    return forward, input, weight


def _make(args: argparse.Namespace, name: str) -> Schedule:
    """Return a named schedule; for `search`, a schedule with as many stages."""
    kind = kind_of(name)
    virtual = kind.usual_virtual if args.virtual is None else args.virtual
    return make("looped-bfs" if kind.row is None else name, args.pp, virtual, args.microbatches)


def _played(args: argparse.Namespace, name: str, stages: _Stages) -> Played:
    """Play the schedule with this name; raise PlanError if it exceeds the limit."""
    schedule = _make(args, name)
    virtual = schedule.virtual
    limit = _limit(args.limit, virtual)
    if name == FOUND:
        schedule = stages.found(args.pp, virtual, args.microbatches)
    played = play(schedule, stages.times(schedule))
    if limit is not None and max(played.peaks) > limit:
        raise PlanError(
            f"the schedule {name} holds {max(played.peaks) / virtual:g} micro-batches, and --limit is "
            f"{args.limit:g}",
            possible=f"--name {FOUND}, which keeps to the limit; or a limit that the schedule keeps",
            change=f"write --name {FOUND}, or a greater limit",
        )
    return played


def _limit(limit: float | None, virtual: int) -> int | None:
    """Return the limit in micro-batches of one stage."""
    if limit is None:
        return None
    if not (math.isfinite(limit) and limit >= 1):
        raise PlanError(
            f"--limit {limit:g} leaves no room for a micro-batch",
            possible="a number of micro-batches, 1 or more",
            change="write --limit 1 or more, or leave it out",
        )
    return math.floor(limit * virtual)


def _compared(args: argparse.Namespace, stages: _Stages) -> list[Played]:
    """Return all schedules that are possible for these numbers; print the names of the others."""
    played, left_out = [], []
    for name in (*NAMES, FOUND):
        made, refused = [], {}
        for virtual in sorted({1, 2, 1 if args.virtual is None else args.virtual}):
            try:
                made.append(_played(_with(args, virtual), name, stages))
            except PlanError as error:
                refused[virtual] = error
        if not made:
            left_out.append((name, refused[kind_of(name).least_virtual]))
        played += made
    if not played:
        raise left_out[0][1]
    for name, reason in left_out:
        print(f"left out {name}: {reason.given}", file=sys.stderr)
    return played


def _with(args: argparse.Namespace, virtual: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "virtual": virtual})


def _text(played: Played) -> str:
    schedule = played.schedule
    width = shutil.get_terminal_size((_WIDTH_OF_FILES, 0)).columns
    rows = [
        [
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            f"{played.busy(rank):.6g}",
            f"{played.idle(rank):.6g}",
            f"{played.stalled(rank):.6g}",
            f"{played.peaks[rank] / schedule.virtual:g}",
        ]
        for rank in range(schedule.ranks)
    ]
    head = ["rank", "stages", "busy", "idle", "stalled", "activations"]
    return "\n\n".join(
        [
            picture(played, width),
            table_of(head, rows),
            f"{schedule.name}: {played.makespan:.6g} long; bubble {played.bubble:.1%} of the time, "
            f"{played.bubble_over_ideal:.1%} over the ideal; "
            f"at most {max(played.peaks) / schedule.virtual:g} micro-batches of activations",
        ]
    )


def _cut_text(played: Played, model: ModelStages) -> str:
    """Return the stages of a model, the time of a split by count, and the Plan."""
    schedule, times = played.schedule, played.times
    plan, memory = model.plan(schedule), model.memory(schedule)
    rows = [
        [
            str(stage),
            str(schedule.placement[stage]),
            blocks,
            f"{times.forward[stage]:.4g}",
            f"{times.input[stage] + times.weight[stage]:.4g}",
            *([] if model.limit is None else [format_bytes(round(memory[stage]))]),
        ]
        for stage, blocks in enumerate(plan.split.split("-"))
    ]
    head = ["stage", "rank", "blocks", "forward", "backward"]
    by_count = play(schedule, model.times_of(model.split_by_count(schedule))).makespan
    longer = by_count / played.makespan - 1 if played.makespan else 0.0
    return "\n\n".join(
        [
            table_of([*head, *([] if model.limit is None else ["memory"])], rows),
            f"times in {model.unit}; split=count would be {by_count:.6g} long, {longer:+.1%}",
            f"plan: {_settings(plan)}",
        ]
    )


def _settings(plan: Plan) -> str:
    """Return the settings that a Plan needs for this schedule, with any other degrees."""
    return str(plan).removeprefix("dp=1,")


def _comparison(played: Sequence[Played], model: ModelStages | None) -> str:
    rows = [
        [
            each.schedule.name,
            str(each.schedule.virtual),
            f"{each.makespan:.6g}",
            f"{each.bubble:.1%}",
            f"{each.bubble_over_ideal:.1%}",
            f"{max(each.peaks) / each.schedule.virtual:g}",
            *([] if model is None else [model.plan(each.schedule).split]),
        ]
        for each in played
    ]
    head = ["schedule", "stages", "length", "bubble", "over the ideal", "activations"]
    return table_of([*head, *([] if model is None else ["split"])], rows)


def _summary(played: Played, model: ModelStages | None) -> dict[str, Any]:
    schedule: Schedule = played.schedule
    ranks = range(schedule.ranks)
    summary = {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "virtual": schedule.virtual,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "makespan": played.makespan,
        "bubble": played.bubble,
        "bubble_over_ideal": played.bubble_over_ideal,
        "busy": [played.busy(rank) for rank in ranks],
        "idle": [played.idle(rank) for rank in ranks],
        "stalled": [played.stalled(rank) for rank in ranks],
        "peak_activations": [peak / schedule.virtual for peak in played.peaks],
        "table": [[str(action) for action in row] for row in schedule.table],
        "starts": [list(starts) for starts in played.starts],
    }
    if model is not None:
        plan, times = model.plan(schedule), played.times
        summary |= {
            "plan": _settings(plan),
            "split": plan.split,
            "forward": list(times.forward),
            "backward": [each + weight for each, weight in zip(times.input, times.weight, strict=True)],
            "memory": model.memory(schedule),
        }
    return summary
