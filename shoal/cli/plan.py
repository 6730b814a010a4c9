"""`shoal plan`: the best Plans for a model on a cluster, and why."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.outlook import (
    ASIDE,
    add_outlook,
    as_asked,
    aside,
    band_summary,
    band_text,
    long_run_of,
    long_run_summary,
    long_run_text,
    traffic_summary,
    traffic_text,
)
from shoal.cli.table import as_json, paragraph, table_of, write_text
from shoal.cli.workload import MFU, add_margin, add_workload, open_workload
from shoal.errors import ModelError
from shoal.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from shoal.predict.planner import Candidate, Choice, Explanation, Unequal

_DESCRIPTION = f"""\
Finds the fastest Plans for a model on a cluster. Considers every legal Plan, leaves out those that do not fit
in memory and those that a lower bound shows to be slower, and plays a step of the others, as shoal simulate
does. The table has one row, the best Plan, for each choice of degrees. The text below it says what bounds the
best Plan, what half and twice each degree would cost, which layout of another kind is best and why it loses,
and what would be gained on a machine with twice as much of one resource. Every Plan that it names was played.

The model is a preset, such as llama3-8b, or a .json file of a traced model. The cluster is a preset or a
.toml file. With --objective money, a Plan may use fewer devices if they train a token for less money.

{paragraph(MFU, indent="")}

Exit codes: 0 a Plan was found; 2 wrong input, or the model does not fit.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = _DESCRIPTION
    add_workload(parser)
    add_margin(parser)
    add_outlook(parser)
    parser.add_argument("--batch", metavar="N", type=int, required=True, help="sequences in a step")
    parser.add_argument("--objective", choices=("time", "money"), default="time", help="what to minimise")
    parser.add_argument(
        "--precision",
        choices=("fp32", "tf32", "bf16", "fp8"),
        help="the precision of all Plans (default: bf16 where the device is fastest in it; never fp8)",
    )
    parser.add_argument("--top", metavar="N", type=int, default=5, help="rows of the table (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--write", metavar="CONFIG.toml", type=Path, help="also write a configuration for shoal train"
    )


def run(args: argparse.Namespace) -> int:
    """Print the choice of Plans.

    Raises:
        ModelError: There is no such model, or --write was given for one that Shoal's transformer is not.
        ClusterError: There is no such cluster, or it has no price where money decides.
        PlanError: No Plan is legal, or none fits.
        UserError: A file cannot be read or written.
    """
    from shoal.predict.planner import choose
    from shoal.spec.cluster import Cluster

    cluster = as_asked(Cluster.parse(args.cluster), args)
    workload = open_workload(args.model, args.sequence, cluster)
    with _no_collection():
        choice = choose(
            workload,
            cluster,
            args.batch,
            objective=args.objective,
            margin=args.margin,
            limit=args.top,
            precision=args.precision,
            fork=args.is_program,
        )
        explanation = choice.explain()
    if args.write is not None:
        _write(args, choice.best)
    best = choice.best
    run = long_run_of(args, workload, best.cluster, best.seconds, best.batch)
    summary = _summary(choice, explanation)
    if run is not None:
        summary["long_run"] = long_run_summary(run, best.cluster)
    if args.json:
        print(as_json(summary))
    else:
        print(_text(summary) + (f"\n\n{long_run_text(run, best.cluster)}" if run is not None else ""))
    return 0


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stop garbage collection: searches keep their objects, and a collection takes as long as a search."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # else the first collection would go through all of it
        gc.enable()


def _write(args: argparse.Namespace, best: Candidate) -> None:
    from shoal.predict.planner import configuration
    from shoal.spec.workload import shape

    if args.model.endswith(".json"):
        raise ModelError(
            f"--write was given for {args.model}, a trace, which does not say how to build the model",
            possible="--write with a preset",
            change="leave out --write, and give the Plan to shoal train --plan with your model",
        )
    found = shape(args.model)
    text = configuration(best, found if args.sequence is None else found.replace(seq=args.sequence))
    write_text("configuration", args.write, "--write", text)


def _summary(choice: Choice, explanation: Explanation) -> dict[str, Any]:
    best = choice.best
    return {
        "model": best.workload.name,
        "parameters": best.workload.parameters,
        "cluster": best.cluster.name,
        "devices": best.devices,
        "batch": best.batch,
        "sequence": best.workload.length,
        "legal_plans": choice.legal,
        "played_plans": choice.played,
        "plans": [_row(each) for each in choice.candidates],
        "exchanges": traffic_summary(explanation.traffic, best.parts),
        "explanation": {
            "sentences": list(explanation.sentences()),
            "without_memory_limit": _short(explanation.unlimited),
            "sizes": [
                {
                    "setting": each.setting,
                    "value": getattr(each.plan, each.setting),
                    "slower": each.slower,
                    "memory": each.memory,
                    "fits": each.fits,
                }
                for each in explanation.sizes
            ],
            "degrees": [
                {"degree": each.degree, "value": each.value, "best": _short(each.best)}
                for each in explanation.neighbours
            ],
            "other_kind": _short(explanation.other),
            "fp8": _short(explanation.coarser),
            **({} if explanation.unequal is None else {"devices": _devices(explanation.unequal)}),
            "machine": [{"twice": each.name, "best": _short(each.best)} for each in explanation.changes],
        },
    }


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "plan": str(candidate.plan),
        "layout": candidate.layout,
        "degrees": candidate.degrees_text,
        "devices": candidate.devices,
        "step_seconds": candidate.seconds,
        **band_summary(candidate.workload, candidate.cluster, candidate.plan, candidate.seconds),
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "memory": candidate.memory.peak,
        "memory_parts": dict(candidate.memory.parts),
        "parts": dict(candidate.parts),
        "bubble": candidate.bubble,
        "communication": candidate.communication,
        "dollars_per_billion_tokens": candidate.dollars_per_billion_tokens or None,
    }


def _devices(unequal: Unequal) -> list[dict[str, Any]]:
    """Return what slower devices cost."""
    return [
        {
            "slower": each.name,
            "devices": each.devices,
            "if_quickest": _short(each.replaced),
            "without": _short(each.without),
        }
        for each in unequal.slower
    ]


def _short(candidate: Candidate | None) -> dict[str, Any] | None:
    return None if candidate is None else {"plan": str(candidate.plan), "step_seconds": candidate.seconds}


def _text(summary: dict[str, Any]) -> str:
    plans, size = summary["plans"], format_count(summary["parameters"])
    heading = (
        f"{summary['model']}, {size} parameters, on {summary['devices']} devices of {summary['cluster']}: "
        f"batch {summary['batch']} x {summary['sequence']} tokens\n"
        f"{summary['legal_plans']:,} legal Plans, {summary['played_plans']:,} of them played; "
        "bounds leave out the others"
    )
    return "\n\n".join(
        [
            heading,
            _table(plans),
            paragraph(f"step: {format_seconds(plans[0]['step_seconds'])}, {band_text(plans[0])}"),
            "\n".join([f"plan: {plans[0]['plan']}", *(f"then: {each['layout']}" for each in plans[1:])]),
            "\n".join(map(paragraph, summary["explanation"]["sentences"])),
            *([traffic_text(summary["exchanges"])] if summary["exchanges"] else []),
        ]
    )


def _table(plans: Sequence[dict[str, Any]]) -> str:
    with_price = plans[0]["dollars_per_billion_tokens"] is not None
    rows = [
        [
            each["degrees"],
            *([str(each["devices"])] if len({one["devices"] for one in plans}) > 1 else []),
            format_seconds(each["step_seconds"]),
            aside(each, each["step_seconds"]),
            f"{each['tokens_per_second']:,.0f}",
            f"{each['mfu']:.1%}",
            f"{each['communication']:.1%}",
            f"{each['bubble']:.1%}",
            format_bytes(round(each["memory"])),
            *([f"{each['dollars_per_billion_tokens']:,.0f}"] if with_price else []),
        ]
        for each in plans
    ]
    head = ["degrees", "step", ASIDE, "tokens/s", "MFU", "communication", "bubble", "memory"]
    if len(rows[0]) - with_price > len(head):
        head.insert(1, "devices")
    return table_of([*head, *(["$/B tokens"] if with_price else [])], rows)
