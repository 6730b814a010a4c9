"""Says what a rank holds at its peak: weights, gradients, the optimizer's state, activations; and how much
each block has.

Of a run it shows what its second step measured, beside the prediction for its Plan if its model is a preset.
Measured activations are all tensors that are not one of the others: what forward keeps for backward, working
memory, gathered weights, buckets.

Of a Plan, such as dp=8,tp=8,shard=zero1, it shows the prediction, and needs --model, --cluster and --batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.table import as_json, labelled, paragraph, table_of
from shoal.cli.workload import open_workload
from shoal.errors import RunError, UserError
from shoal.spec.run import OUTSIDE
from shoal.units import format_bytes

if TYPE_CHECKING:
    from shoal.predict.cost import RankMemory
    from shoal.predict.cost.memory import PieceMemory
    from shoal.spec.run import MeasuredMemory

_STATES = ("weights", "gradients", "optimizer")
_MOST_RANKS = 16  # ranks that are printed; --json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("what", metavar="RUN|PLAN", help="the directory of a run, or a Plan")
    parser.add_argument(
        "--model", metavar="MODEL", help="of a Plan: a preset, or a .json file of a traced model"
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="a preset, such as dgx-h100:64, or a .toml file (of a run, default: its own, if any)",
    )
    parser.add_argument("--sequence", metavar="N", type=int, help="of a Plan: tokens in a sequence")
    parser.add_argument("--batch", metavar="N", type=int, help="of a Plan: sequences in a step")
    parser.add_argument(
        "--memory", metavar="SIZE", default="", help="of a Plan: memory that training may take of a device"
    )
    parser.add_argument("--rank", metavar="R", type=int, help="of a run: the rank whose blocks are shown")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the memory of a run or of a Plan.

    Raises:
        RunError: The run did not measure its memory, or has no such rank.
        PlanError: The Plan cannot be read, or does not fit the devices, the batch or the model.
        UserError: An option is missing, or names something that is not there.
    """
    if Path(args.what).exists() or "=" not in args.what:
        summary = _of_run(args)
        text = _run_text
    else:
        summary = _of_plan(args)
        text = _plan_text
    print(as_json(summary) if args.json else text(summary))
    return 0


def _of_plan(args: argparse.Namespace) -> dict[str, Any]:
    from shoal.predict.cost import Memories, settle_split
    from shoal.predict.cost.memory import by_piece
    from shoal.spec.cluster import Cluster, limited
    from shoal.spec.plan import Plan, SettledPlan

    missing = [f"--{name}" for name in ("model", "cluster", "batch") if getattr(args, name) is None]
    if missing:
        raise UserError(
            f"the memory of a Plan was asked for without {', '.join(missing)}",
            possible="shoal memory PLAN --model MODEL --cluster CLUSTER --batch N, or shoal memory RUN",
            change=f"add {', '.join(missing)}",
        )
    plan = SettledPlan.of(Plan.parse(args.what), args.batch)
    cluster = limited(Cluster.parse(args.cluster), args.memory)
    if ":" not in args.cluster:
        cluster = cluster.with_devices(plan.ranks)
    workload = open_workload(args.model, args.sequence, cluster)
    plan = settle_split(plan, workload, cluster, args.batch)
    memories = Memories(workload, cluster)
    ranks = memories.of(plan, args.batch)
    return {
        "model": workload.name,
        "plan": str(plan),
        "cluster": cluster.name,
        "device_memory": cluster.device.memory,
        "places": [_place(each) | {"fits": each.fits(cluster)} for each in ranks],
        "blocks": [_piece(each) for each in by_piece(memories, plan, args.batch)],
    }


def _of_run(args: argparse.Namespace) -> dict[str, Any]:
    from shoal.spec.run import Run

    opened = Run.open(args.what)
    measured = opened.memory()
    if not measured:
        raise RunError(
            f"{opened.path} did not measure its memory",
            possible="a run that made two steps with record.memory=true, and did not compile its model",
            change="train with record.memory=true, or ask for the prediction with shoal memory PLAN",
        )
    ranks = {each.rank: each for each in measured}
    rank = max(measured, key=lambda each: each.peak).rank if args.rank is None else args.rank
    if rank not in ranks:
        raise RunError(
            f"{opened.path} has no memory of rank {rank}",
            possible=f"the ranks {', '.join(map(str, ranks))}",
            change="give one of these, or leave out --rank",
        )
    predicted, why = _predicted(opened, rank, args.cluster)
    return {
        "run": str(opened.path),
        "plan": opened.description.get("plan"),
        "ranks": [_measured(each) for each in measured],
        "rank": rank,
        "predicted": predicted,
        "not_predicted": why,
    }


def _predicted(opened: Any, rank: int, cluster: str | None) -> tuple[dict[str, Any] | None, str]:
    """Return the tensors of a rank at its peak as predicted, and of the blocks that it has; or why not."""
    from shoal.predict.cost import Memories
    from shoal.predict.cost.memory import by_piece
    from shoal.predict.simulate import Prediction, recorded_cluster
    from shoal.spec.cluster import Cluster
    from shoal.spec.plan import Mesh

    try:
        machines = Cluster.parse(cluster) if cluster is not None else recorded_cluster(opened)
        prediction = Prediction.of(opened, machines or Cluster.parse("laptop"))
    except UserError as error:
        if cluster is not None:
            raise
        return None, error.given
    place = Mesh.of(prediction.plan).coordinate(rank % prediction.plan.ranks, "pp")
    memories = Memories(prediction.workload)
    fullest = memories.of(prediction.plan, prediction.batch)[place]
    pieces = by_piece(memories, prediction.plan, prediction.batch)
    return {**_place(fullest), "blocks": [_piece(each) for each in pieces if each.place == place]}, ""


def _place(memory: RankMemory) -> dict[str, Any]:
    return {
        "place": memory.rank,
        "peak_bytes": memory.peak,
        "moment": memory.moment,
        "parts": {name: size for name, size in memory.parts.items() if size},
    }


def _piece(piece: PieceMemory) -> dict[str, Any]:
    return {
        "name": piece.name,
        "place": piece.place,
        **piece.states._asdict(),
        "activations": piece.activations,
        "activations_in_files": piece.stored,
    }


def _measured(memory: MeasuredMemory) -> dict[str, Any]:
    return {
        "rank": memory.rank,
        "step": memory.step,
        "peak_bytes": memory.peak,
        "moment": memory.moment,
        "parts": memory.parts,
        "resident_bytes": memory.resident,
        "reserved_bytes": memory.reserved,
        "blocks": [
            {"name": unit.name, **{name: getattr(unit, name) for name in (*_STATES, "activations")}}
            for unit in memory.units
        ],
    }


def _run_text(summary: Mapping[str, Any]) -> str:
    here = next(each for each in summary["ranks"] if each["rank"] == summary["rank"])
    rows = [("run", summary["run"]), ("plan", summary["plan"] or "")]
    at = f", at {here['moment']}" if here["moment"] else ""
    rows.append(
        ("peak", f"{_size(here['peak_bytes'])} of tensors on rank {here['rank']} in step {here['step']}{at}")
    )
    if here["reserved_bytes"]:
        gaps = here["reserved_bytes"] - here["peak_bytes"]
        rows.append(
            (
                "reserved",
                f"{_size(here['reserved_bytes'])} by the allocator, {_size(gaps)} of it between tensors",
            )
        )
    if here["resident_bytes"]:
        rows.append(
            ("resident", f"{_size(here['resident_bytes'])} of the process at most, with Python and libraries")
        )
    if summary["not_predicted"]:
        rows.append(("predicted", f"no: {summary['not_predicted']}"))
    paragraphs = [labelled(rows), _compared(here, summary["predicted"])]
    if len(summary["ranks"]) > 1:
        paragraphs.append(_ranks_text(summary["ranks"]))
    title = f"blocks of rank {here['rank']}"
    paragraphs.append(_blocks_text(title, here["blocks"], summary["predicted"]))
    return "\n\n".join(paragraphs)


def _plan_text(summary: Mapping[str, Any]) -> str:
    fullest = max(summary["places"], key=lambda each: each["peak_bytes"])
    fits = "fits" if all(each["fits"] for each in summary["places"]) else "DOES NOT FIT"
    rows = [
        ("model", summary["model"]),
        ("plan", summary["plan"]),
        ("cluster", summary["cluster"]),
        (
            "peak",
            f"{_size(fullest['peak_bytes'])} of {_size(summary['device_memory'])}, {fits}, at "
            f"{fullest['moment']}",
        ),
    ]
    paragraphs = [labelled(rows)]
    names = list(dict.fromkeys(name for each in summary["places"] for name in each["parts"]))
    lines = [
        [
            str(each["place"]),
            _size(each["peak_bytes"]),
            *(_size(each["parts"].get(name, 0)) for name in names),
        ]
        for each in summary["places"][:_MOST_RANKS]
    ]
    paragraphs.append(table_of(["at the peak of place", "all", *names], lines))
    for place in range(len(summary["places"])):
        blocks = [each for each in summary["blocks"] if each["place"] == place]
        paragraphs.append(_blocks_text(f"blocks of place {place}", blocks))
        if place + 1 == _MOST_RANKS:
            break
    paragraphs.append(paragraph("Activations of a block are those of one micro-batch."))
    return "\n\n".join(paragraphs)


def _compared(measured: Mapping[str, Any], predicted: Mapping[str, Any] | None) -> str:
    """Return the parts at the peak, predicted beside measured if there is a prediction."""
    head = ["part", "measured"]
    sizes = {**measured["parts"], "all": measured["peak_bytes"]}
    if predicted is None:
        return table_of(head, [[name, _size(size)] for name, size in sizes.items()])
    states = {name: predicted["parts"].get(name, 0.0) for name in _STATES}
    expected = {
        **states,
        "activations": predicted["peak_bytes"] - sum(states.values()),
        "all": predicted["peak_bytes"],
    }
    rows = []
    for name, size in sizes.items():
        one = expected.get(name)
        error = f"{one / size - 1:+.1%}" if one and size else "-"
        rows.append([name, _size(size), "-" if one is None else _size(one), error])
    return table_of([*head, "predicted", "error"], rows)


def _ranks_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    names = list(ranks[0]["parts"])
    rows = [
        [str(each["rank"]), _size(each["peak_bytes"]), *(_size(each["parts"][name]) for name in names)]
        for each in ranks[:_MOST_RANKS]
    ]
    return table_of(["rank", "peak", *names], rows)


def _blocks_text(
    title: str, blocks: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any] | None = None
) -> str:
    """Return the blocks' memory; equal ones that follow one another share a line."""
    names: tuple[str, ...] = (*_STATES, "activations")
    if any(each.get("activations_in_files") for each in blocks):
        names = *names, "activations_in_files"
    head = [title, *(name.replace("_", " ") for name in names)]
    layers = [each for each in blocks if each["name"] != OUTSIDE]
    expected: list[float | None] = [None] * len(blocks)
    if predicted is not None:
        known = [each["activations"] for each in predicted["blocks"] if each["name"].startswith("layer")]
        if len(known) == len(layers):
            coming = iter(known)
            expected = [None if each["name"] == OUTSIDE else next(coming) for each in blocks]
            head.append("predicted")
    lines = [
        (
            each["name"],
            [
                *(_size(each[name]) for name in names),
                *([_maybe(one)] if len(head) > 1 + len(names) else []),
            ],
        )
        for each, one in zip(blocks, expected, strict=True)
    ]
    return table_of(head, [[_joined(names), *cells] for names, cells in _runs(lines)])


def _runs(lines: Iterable[tuple[str, list[str]]]) -> Iterable[tuple[list[str], list[str]]]:
    for cells, group in groupby(lines, key=lambda line: line[1]):
        yield [name for name, _ in group], cells


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, each"


def _maybe(nbytes: float | None) -> str:
    return "-" if nbytes is None else _size(nbytes)


def _size(nbytes: float) -> str:
    return format_bytes(round(nbytes))
