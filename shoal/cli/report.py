"""Explains a run: where the time of a step went, how fast it was, what loss it reached."""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.analyze.diagnosis import told_by, verdict
from shoal.analyze.foreign import is_foreign
from shoal.cli.breakdown import (
    breakdown_summary,
    collectives_text,
    compare_text,
    launch_text,
    named_collectives_text,
    parts_text,
    ranks_text,
    verdict_summary,
    words,
)
from shoal.cli.table import as_json, labelled, paragraph, table_of, timeline_at, write_file
from shoal.errors import MissingExtraError, RunError, UserError
from shoal.predict.cost.outlook import account_summary
from shoal.predict.simulate import (
    Prediction,
    StageTimes,
    kinds_compared,
    measured_timeline,
    recorded_cluster,
    stage_times,
)
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Groups, Plan
from shoal.spec.run import Run, account, json_number, speed_of
from shoal.spec.timeline import (
    Breakdown,
    Kind,
    Purpose,
    Span,
    Timeline,
    explain,
    named_collectives,
    write_chrome_trace,
)
from shoal.spec.timeline.intervals import StepWindows
from shoal.units import format_count, format_seconds, parse_steps

_SENT = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
"""Bytes that each of n ranks sends, over (n - 1) / n of the bytes that its span is counted with."""

_SERVED = ("push", "pull")
_FP32 = 4


def exchanged_summary(plan: Plan, timeline: Timeline, parameters: int) -> dict[str, float] | None:
    """Return the bytes of a mean step of a rank, for JSON; None if all workers average whole gradients.

    What workers send when they save or validate is not in a step. Whole gradients of a rank's part, fp32,
    take 2 (d - 1) / d of its bytes between d workers, and twice its bytes to servers and back.

    Args:
        plan: The Plan of the run.
        timeline: Its spans.
        parameters: Parameters of the model.
    """
    exchange, workers = plan.exchanged, plan.replicas
    is_loose = exchange.merges or exchange.compresses or exchange.is_chosen or exchange.is_served
    if not is_loose or workers == 1 or not timeline.steps():
        return None
    groups = set() if exchange.is_served else set(Groups.of(plan).workers.tile(plan.ranks))
    steps, sent = 0, 0.0
    for rank in timeline.ranks:
        made = [step for index in timeline.steps() if (step := timeline.step(rank, index)) is not None]
        starts = [step.start for step in made]
        steps += len(made)
        for span in timeline.of(rank):
            place = bisect_right(starts, span.start) - 1
            if place >= 0 and span.start < made[place].stop:
                sent += _sent(span, groups)
    cut = plan.tp * plan.pp * (plan.shards * plan.cp if plan.sharding.cuts_optimizer else 1)
    whole = _FP32 * parameters / cut * 2 * (1 if exchange.is_served else (workers - 1) / workers)
    return {"sent": sent / steps, "whole_gradients": whole}


def exchanged_text(summary: Mapping[str, float]) -> str:
    """Return the sentence of a report about what `exchanged_summary` returned."""
    sent, whole = summary["sent"], summary["whole_gradients"]
    text = f"{sent / 1e6:,.3g} MB of a rank to other workers in the mean step"
    return f"{text}, 1/{whole / sent:,.1f} of whole gradients" if sent > 0 else text


def sent_bytes(operation: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank of a collective sends; 0 for one that sums or gathers nothing.

    Args:
        operation: Its name, such as "all_reduce".
        nbytes: Its bytes, counted as in nccl-tests' algbw.
        ranks: Number of ranks.
    """
    return _SENT.get(operation, 0.0) * nbytes * (ranks - 1) / ranks


def _sent(span: Span, groups: set[tuple[int, ...]]) -> float:
    """Return the bytes that a rank sent in a span, or exchanged with servers; 0 if not between workers."""
    if span.kind != Kind.COLLECTIVE or span.purpose != Purpose.DATA:
        return 0.0
    operation = span.name.partition(":")[0]
    if operation in _SERVED:
        return float(span.bytes)
    return sent_bytes(operation, span.bytes, len(span.group)) if span.group in groups else 0.0


_DESCRIBED = ("name", "plan", "world_size", "model", "device", "since_step")
_OF_METRICS = (
    *("loss", "validation_loss", "validation_accuracy", "servers", "decisions"),
    *("tokens_per_second", "tokens_per_second_per_device", "mfu"),
)
_LEAST_LOSS = 0.0005  # share of the wall clock below which a cause is not named
_WORKS = ("forward", "backward", "input", "weight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "path",
        metavar="RUN",
        type=Path,
        help="the directory of a run, a folder of traces of PyTorch's profiler, or a table of operations",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rank", metavar="R", type=int, help="explain the time of this rank only")
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="also list each collective of a step, such as each bucket's: bytes, algorithm, time, overlap",
    )
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="also write the timeline for Perfetto or chrome://tracing"
    )
    parser.add_argument(
        "--steps", metavar="FIRST:LAST", help="with --trace: only these steps, such as 100:105"
    )
    parser.add_argument(
        "--parquet",
        metavar="DIR",
        type=Path,
        help="also write spans.parquet and metrics.parquet into this folder (extra `parquet`)",
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="also compare with a prediction for these machines, such as a file of `shoal probe` "
        "(default: the run's --cluster, if any)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report of a run.

    Raises:
        RunError: The path is not a run, or the run has no such rank, no timeline for a trace, or no model
            that can be predicted.
        ClusterError: There is no such Cluster.
        UserError: The trace cannot be written.
        ShoalError: A file of the run is malformed.
    """
    steps = _asked_steps(args)
    if is_foreign(args.path):
        return _report_foreign(args)
    opened = Run.open(args.path)
    timeline = measured_timeline(opened)
    breakdown = explain(timeline) if timeline.steps() else None
    if args.rank is not None:
        _require_rank(opened, breakdown, args.rank)
    summary = summarise(opened, breakdown, stage_times(timeline), rank=args.rank)
    summary["exchanged"] = _exchanged(summary, timeline)
    cluster = Cluster.parse(args.cluster) if args.cluster is not None else recorded_cluster(opened)
    summary["account"] = account_summary(account(opened), opened.description, cluster)
    if breakdown is not None:
        prediction = _prediction(opened, cluster, is_asked=args.cluster is not None)
        summary["verdict"] = verdict_summary(verdict(timeline, **told_by(prediction)))
        if prediction is not None:
            summary |= {
                "cluster": prediction.cluster.name,
                "kinds": kinds_compared(prediction.seconds_by_kind(), timeline),
            }
        if args.collectives:
            summary["each_collective"] = [asdict(each) for each in named_collectives(timeline)]
    if args.trace is not None:
        shown = timeline if steps is None else _only_steps(steps, timeline, opened)
        _write_trace(opened, shown, args.rank, args.trace)
    if args.parquet is not None:
        from shoal.cli.report import write_parquet

        folder = args.parquet
        write_file("tables", folder, "--parquet", lambda folder: write_parquet(opened, timeline, folder))
    print(as_json(summary) if args.json else _text(summary))
    return 0


def _asked_steps(args: argparse.Namespace) -> tuple[int, int] | None:
    """Return the first and the last step of --steps, if it is given.

    Raises:
        UserError: It cannot be read, or there is no --trace.
    """
    if args.steps is None:
        return None
    try:
        steps = parse_steps(args.steps)
    except ValueError as error:
        raise UserError(
            f"--steps {args.steps} was given",
            possible="FIRST:LAST, such as 100:105, or one number",
            change="correct --steps",
        ) from error
    if args.trace is None:
        raise UserError(
            "--steps was given without --trace",
            possible="--trace FILE with --steps",
            change="add --trace FILE, or leave out --steps",
        )
    return steps


def _only_steps(steps: tuple[int, int], timeline: Timeline, run: Run) -> Timeline:
    """Return the spans of some steps, from the first start on any rank to the last end."""
    recorded = timeline.steps()
    found = [
        span
        for rank in timeline.ranks
        for index in recorded
        if steps[0] <= index <= steps[1] and (span := timeline.step(rank, index)) is not None
    ]
    if not found:
        among = f"steps {recorded[0]} to {recorded[-1]}, or some of them" if recorded else "none"
        raise RunError(
            f"{run.path} has no recorded step from {steps[0]} to {steps[1]}",
            possible=f"what it recorded: {among}",
            change="give other --steps",
        )
    return timeline.window(min(span.start for span in found), max(span.stop for span in found))


def _report_foreign(args: argparse.Namespace) -> int:
    """Print the report of traces or of a table of another program."""
    if args.cluster is not None:
        raise RunError(
            f"{args.path} is no run of Shoal, so its step cannot be predicted",
            possible="--cluster for a run of `shoal train`",
            change="leave out --cluster",
        )
    run, timeline = Run(args.path), timeline_at(args.path)
    breakdown = explain(timeline)
    if args.rank is not None:
        _require_rank(run, breakdown, args.rank)
    summary: dict[str, Any] = {
        **dict.fromkeys((*_DESCRIBED, *_OF_METRICS)),
        "run": str(args.path),
        "steps": len(timeline.steps()),
        "verdict": verdict_summary(verdict(timeline)),
        "breakdown": breakdown_summary(breakdown, args.rank),
        "stages": [asdict(stage) for stage in stage_times(timeline)] or None,
    }
    if args.collectives:
        summary["each_collective"] = [asdict(each) for each in named_collectives(timeline)]
    if args.trace is not None:
        _write_trace(run, timeline, args.rank, args.trace)
    print(as_json(summary) if args.json else _text(summary))
    return 0


def _prediction(run: Run, cluster: Cluster | None, *, is_asked: bool) -> Prediction | None:
    """Return the prediction on the machines that are named, or that the run was given; None without any.

    A failed prediction is an error only if the user asked for the prediction.
    """
    if cluster is None:
        return None
    try:
        prediction = Prediction.of(run, cluster)
        prediction.simulation  # noqa: B018 the first use plays the steps
    except UserError as error:
        if is_asked:
            raise
        print(f"not predicted: {error.given}", file=sys.stderr)
        return None
    return prediction


def _exchanged(summary: Mapping[str, Any], timeline: Timeline) -> dict[str, float] | None:
    parameters = (summary["model"] or {}).get("parameters")
    if not (summary["plan"] and parameters):
        return None
    return exchanged_summary(Plan.parse(summary["plan"]), timeline, parameters)


def summarise(
    run: Run, breakdown: Breakdown | None, stages: Sequence[StageTimes] = (), *, rank: int | None = None
) -> dict[str, Any]:
    """Return the report as an object for JSON; facts that the run does not have are None.

    Args:
        run: The run.
        breakdown: Its timeline, explained; None if it has none.
        stages: Its pipeline stages; none if it has no pipeline.
        rank: The rank whose time to show; all ranks if None.
    """
    metrics = run.metrics()
    return {
        "run": str(run.path),
        **{key: run.description.get(key) for key in _DESCRIBED},
        **_progress(metrics),
        **_speed(metrics, run.description),
        "servers": _served(run),
        "decisions": [asdict(each) for each in run.decisions()] or None,
        "breakdown": None if breakdown is None else breakdown_summary(breakdown, rank),
        "stages": [asdict(stage) for stage in stages] or None,
    }


def _progress(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    trained = [values for values in metrics if "loss" in values]
    validated = [values for values in metrics if "validation_loss" in values]
    return {
        "steps": len(trained),
        "loss": _first_and_last(trained, "loss"),
        "validation_loss": _first_and_last(validated, "validation_loss"),
        "validation_accuracy": _first_and_last(
            [values for values in validated if "validation_accuracy" in values], "validation_accuracy"
        ),
    }


def _served(run: Run) -> dict[str, Any] | None:
    """Return what parameter servers applied of each worker, and how stale it was; None without servers."""
    applied = run.updates()
    if not applied:
        return None
    workers = sorted({each.worker for each in applied})
    stale = {at: [each.staleness for each in applied if each.worker == at] for at in workers}
    return {
        "contributions": len(applied),
        "staleness": {
            "mean": fmean(each.staleness for each in applied),
            "most": max(map(max, stale.values())),
        },
        "workers": [
            {"worker": at, "contributions": len(of), "staleness": fmean(of)} for at, of in stale.items()
        ],
    }


def _first_and_last(metrics: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    if not metrics:
        return None
    return {
        end: {"step": values["step"], "value": json_number(values[name])}
        for end, values in (("first", metrics[0]), ("last", metrics[-1]))
    }


def _speed(metrics: Sequence[Mapping[str, Any]], description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the speed of the median step after warm-up."""
    speed = speed_of(metrics, description)
    return {
        "tokens_per_second": speed.total,
        "tokens_per_second_per_device": speed.per_device,
        "mfu": speed.mfu,
    }


def _require_rank(run: Run, breakdown: Breakdown | None, rank: int) -> None:
    explained = [each.rank for each in breakdown.ranks] if breakdown is not None else []
    if rank not in explained:
        raise RunError(
            f"the timeline of {run.path} holds no finished step of rank {rank}",
            possible=f"the ranks that finished one: {', '.join(map(str, explained)) or 'none'}",
            change="give one of these, or leave out --rank",
        )


def _write_trace(run: Run, timeline: Timeline, rank: int | None, path: Path) -> None:
    if not len(timeline):
        raise RunError(
            f"{run.path} has no timeline, so there is nothing to trace",
            possible="a run that recorded its timeline",
            change="leave out --trace, or train with recording on",
        )
    shown = timeline if rank is None else Timeline(timeline.of(rank))
    write_file("trace", path, "--trace", lambda path: write_chrome_trace(shown, path))
    print("open it in https://ui.perfetto.dev", file=sys.stderr)


def _text(summary: Mapping[str, Any]) -> str:
    paragraphs = [_heading(summary)]
    if summary.get("account") is not None:
        paragraphs.append(_account_text(summary["account"]))
    if (breakdown := summary["breakdown"]) is None:
        paragraphs.append(
            "The run has no timeline of steps under this Plan, so it cannot say where the time went."
        )
    else:
        paragraphs += ["\n".join(map(paragraph, summary["verdict"]["sentences"])), parts_text(breakdown)]
        if launch := launch_text(breakdown, summary["plan"] or ""):
            paragraphs.append(launch)
        if len(breakdown["ranks"]) > 1:
            paragraphs.append(ranks_text(breakdown["ranks"]))
        if summary["stages"] is not None:
            paragraphs.append(_stages_text(summary["stages"]))
        if breakdown["collectives"]:
            paragraphs.append(collectives_text(breakdown["collectives"]))
        if summary.get("each_collective"):
            paragraphs.append(named_collectives_text(summary["each_collective"]))
        if "kinds" in summary:
            paragraphs.append(compare_text(summary["kinds"]))
    return "\n\n".join(paragraphs)


def _heading(summary: Mapping[str, Any]) -> str:
    rows = [("run", summary["run"])]
    if summary["plan"]:
        rows.append(("plan", summary["plan"]))
    if summary.get("cluster"):
        rows.append(("cluster", summary["cluster"]))
    if (summary["model"] or {}).get("parameters"):
        rows.append(("model", f"{format_count(summary['model']['parameters'])} parameters"))
    rows.append(("steps", str(summary["steps"])))
    if summary["since_step"] is not None:
        rows.append(("explained", f"steps from {summary['since_step']} on, under this Plan"))
    for name in ("loss", "validation_loss", "validation_accuracy"):
        if (ends := summary[name]) is not None:
            told = [f"{float(each['value']):.4f} at step {each['step']}" for each in ends.values()]
            rows.append((words(name), ", ".join(dict.fromkeys(told))))
    if (served := summary["servers"]) is not None:
        of_workers = ", ".join(
            f"{each['contributions']} of worker {each['worker']}" for each in served["workers"]
        )
        rows.append(("servers", f"{served['contributions']} contributions applied: {of_workers}"))
        mean, most = served["staleness"]["mean"], served["staleness"]["most"]
        rows.append(("staleness", f"{mean:.2f} updates in the mean, {most} at most"))
    if summary.get("exchanged") is not None:
        rows.append(("sent", exchanged_text(summary["exchanged"])))
    for each in summary["decisions"] or ():
        rows.append(("exchange", f"after step {each['step']}, {each['exchange']}: {each['reason']}"))
    if summary["tokens_per_second"] is not None:
        rows.append(("tokens/s", f"{summary['tokens_per_second']:,.0f} in the median step"))
    if summary["tokens_per_second_per_device"] is not None:
        rows.append(("tokens/s/device", f"{summary['tokens_per_second_per_device']:,.0f}"))
    if summary["mfu"] is not None:
        rows.append(("MFU", f"{summary['mfu']:.1%}"))
    return labelled(rows)


def _account_text(summary: Mapping[str, Any]) -> str:
    """Return an object of `account_summary` in a few lines."""
    starts, failed = summary["launches"], summary["failures"]
    counts = f"{starts} start{'s' if starts != 1 else ''}, {failed} failure{'s' if failed != 1 else ''}"
    rows = [
        ("wall clock", f"{format_seconds(summary['wall_seconds'])}: {counts}"),
        (
            "goodput",
            f"{summary['goodput']:.1%}: {format_seconds(summary['step_seconds'])} of steps that count",
        ),
    ]
    least = _LEAST_LOSS * summary["wall_seconds"]
    lost = sorted(summary["lost_seconds"].items(), key=lambda each: -each[1])
    if told := [f"{name} {format_seconds(seconds)}" for name, seconds in lost if seconds > least]:
        rows.append(("lost", ", ".join(told)))
    rows.append(("cost so far", _cost(summary["device_hours"], summary["dollars"])))
    if summary["steps_left"] and summary["seconds_left"] is not None:
        cost = _cost(summary["device_hours_left"], summary["dollars_left"])
        time = format_seconds(summary["seconds_left"])
        rows.append(("to go", f"{summary['steps_left']} steps in {time}: {cost}"))
    return labelled(rows)


def _cost(device_hours: float, dollars: float | None) -> str:
    money = "" if dollars is None else f", ${dollars:,.2f}"
    return f"{device_hours:,.4g} device hours{money}"


def _stages_text(stages: Sequence[Mapping[str, Any]]) -> str:
    works = [name for name in _WORKS if any(stage[name] is not None for stage in stages)]
    mean = fmean(stage["step"] for stage in stages)
    rows = [
        [
            str(stage["stage"]),
            ", ".join(map(str, stage["ranks"])),
            *("-" if stage[work] is None else f"{stage[work]:.6f}" for work in works),
            f"{stage['step']:.6f}",
            f"{stage['step'] / mean:.0%}",
        ]
        for stage in stages
    ]
    return table_of(["seconds of stage", "ranks", *works, "step", "of the mean"], rows)


_ROWS = 50_000
"""Rows of a group, which is written at once."""


def write_parquet(run: Run, timeline: Timeline, folder: Path) -> None:
    """Write `spans.parquet` and `metrics.parquet` into a folder; make the folder.

    A span has its step, or null between steps; times are in seconds. Metrics have a row for each step.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError("writing Parquet files", package="pyarrow", extra="parquet") from error
    folder.mkdir(parents=True, exist_ok=True)
    word = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        {
            "rank": pa.int32(),
            "step": pa.int64(),
            "lane": word,
            "kind": word,
            "name": pa.string(),
            "start": pa.float64(),
            "duration": pa.float64(),
            "bytes": pa.int64(),
            "group": pa.list_(pa.int32()),
            "algorithm": word,
            "purpose": word,
        }
    )
    with parquet.ParquetWriter(folder / "spans.parquet", schema) as writer:
        spans = _spans(timeline)
        while rows := list(islice(spans, _ROWS)):
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    metrics = run.metrics()
    parquet.write_table(pa.table(_columns(metrics)), folder / "metrics.parquet")


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in timeline.ranks:
        windows = StepWindows(timeline, rank)
        for span in timeline.of(rank):
            yield _row(span, windows.started_in(span))


def _row(span: Span, step: int | None) -> dict[str, Any]:
    return {
        "rank": span.rank,
        "step": step,
        "lane": span.lane,
        "kind": span.kind,
        "name": span.name,
        "start": span.start,
        "duration": span.duration,
        "bytes": span.bytes,
        "group": list(span.group),
        "algorithm": span.algorithm,
        "purpose": span.purpose,
    }


def _columns(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | int | None]]:
    """Return the values by name; None for a step without one, and for a value that is no number."""
    names = dict.fromkeys(["step", *(name for values in metrics for name in values)])
    return {name: [_number(values.get(name), name == "step") for values in metrics] for name in names}


def _number(value: object, is_step: bool) -> float | int | None:
    if not isinstance(value, int | float):
        return None
    return int(value) if is_step else float(value)
