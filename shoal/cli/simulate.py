"""`shoal simulate`: a step of a Plan played against the clock, on machines that need not be there."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.breakdown import breakdown_summary, collectives_text, parts_text, ranks_text
from shoal.cli.outlook import (
    add_outlook,
    as_asked,
    band_summary,
    band_text,
    long_run_of,
    long_run_summary,
    long_run_text,
    traffic_summary,
    traffic_text,
)
from shoal.cli.table import as_json, labelled, paragraph, table_of, write_file, write_text
from shoal.cli.workload import MFU, add_workload, open_workload
from shoal.errors import ClusterError, ConfigError, PlanError, nearest
from shoal.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from shoal.predict.cost import RankMemory
    from shoal.predict.cost.outlook import LongRun
    from shoal.predict.simulate import FailureModel, Simulation
    from shoal.spec.cluster import Cluster
    from shoal.spec.plan import Plan


_DAY = 86_400.0
_LONGEST = 3650 * _DAY
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": _DAY}
_TAILS = ("fixed", "exponential", "heavy")
_MOST_RUNS = 10_000


def _seconds(text: str) -> float:
    number = text.rstrip("smindh")
    return float(number) * _UNITS[text[len(number) :] or "s"]


def _flag(text: str) -> bool:
    return {"yes": True, "no": False}[text]


def _tail(text: str) -> str:
    return {name: name for name in _TAILS}[text]


_SETTINGS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "detection": (_seconds, "a time such as 15s"),
    "restart_tail": (_tail, ", ".join(_TAILS)),
    "hardware": (float, "a share such as 0.78"),
    "repair": (_seconds, "a time such as 12h"),
    "repair_tail": (_tail, ", ".join(_TAILS)),
    "spares": (int, "a number of nodes"),
    "interval": (int, "a number of steps"),
    "copies": (int, "a number of steps"),
    "copy": (_seconds, "a time such as 0.1s"),
    "shrinks": (_flag, "yes, no"),
    "grow": (_seconds, "a time such as 1min"),
    "runs": (int, f"1 to {_MOST_RUNS}"),
    "seed": (int, "a whole number"),
}


def add_failures(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--failures",
        metavar="SETTINGS",
        nargs="?",
        const="",
        help="with --tokens or --steps: also play the run with failures by chance, such as "
        "spares=16,repair=12h,hardware=0.78,copies=1,shrinks=yes,runs=100; "
        f"settings: {', '.join(_SETTINGS)}",
    )


def failures_summary(
    text: str | None, run: LongRun | None, cluster: Cluster, plan: Plan, seconds: float
) -> dict[str, Any] | None:
    """Return what failures do to a long run as an object for JSON; None if this was not asked for.

    Args:
        text: The settings.
        run: The long run; it gives the time to save and to restart.
        cluster: The machines; they give the rate of failures, and spare nodes.
        plan: The Plan; replicas of the model are its data-parallel degree.
        seconds: Duration of a step.

    Raises:
        ConfigError: A setting is unknown or wrong, or the run has no length or no end.
        ClusterError: The Cluster does not say how often devices fail.
    """
    from shoal.predict.simulate import failure_courses

    if text is None:
        return None
    if run is None or not 0 < run.days * _DAY < _LONGEST:
        raise ConfigError(
            "--failures was given without the length of a run, or for one that does not end in ten years",
            possible="--failures together with --tokens or --steps",
            change="add the length of the run, such as --tokens 15T",
        )
    if not cluster.failures:
        raise ClusterError(
            f"--failures was given, and {cluster.name} does not say how often devices fail",
            possible="a Cluster that has `failures`, per device and hour, such as 2e-5",
            change="add `failures` to the Cluster's file, or leave out --failures",
        )
    settings = _parsed(text)
    runs, seed = settings.pop("runs", 100), settings.pop("seed", 0)
    if not 1 <= runs <= _MOST_RUNS:
        raise _wrong("runs", str(runs))
    model = _model(settings, run, cluster, plan, seconds)
    found = failure_courses(model, run.days * _DAY, runs=runs, seed=seed)
    return {
        "days": run.days,
        "runs": runs,
        "nodes": model.nodes,
        "spares": model.spares,
        "seconds_between_failures": model.between,
        "steps_between_checkpoints": model.steps_between_saves,
        "failures": found.failures,
        "without_spare": found.without_spare,
        "goodput": found.goodput,
        "goodput_error": found.error,
        "goodput_low": found.low,
        "goodput_high": found.high,
        "lost": found.lost,
    }


def _model(
    settings: Mapping[str, Any], run: LongRun, cluster: Cluster, plan: Plan, seconds: float
) -> FailureModel:
    from shoal.predict.simulate import FailureModel

    nodes = math.ceil(cluster.devices / cluster.devices_per_node)
    given = {
        "nodes": nodes,
        "replicas": math.gcd(plan.dp, nodes),  # a replica is a number of whole nodes
        "between": run.goodput.between_failures,
        "step": seconds,
        "save": run.save,
        "restart": run.restart,
        "spares": cluster.spare,
    }
    return FailureModel(**{**given, **settings})


def _parsed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if name not in _SETTINGS or not equals:
            raise ConfigError(
                f"--failures {part} is no setting{nearest(name, list(_SETTINGS))}",
                possible=", ".join(f"{each}=..." for each in _SETTINGS),
                change="write, for example, --failures spares=16,repair=12h",
            )
        try:
            found[name] = _SETTINGS[name][0](value)
        except (ValueError, KeyError, OverflowError) as error:
            raise _wrong(name, value) from error
    return found


def _wrong(name: str, value: str) -> ConfigError:
    return ConfigError(
        f"--failures {name}={value} is not allowed",
        possible=_SETTINGS[name][1],
        change=f"correct {name}",
    )


def failures_text(summary: Mapping[str, Any]) -> str:
    """Return it in words."""
    spread = f"{summary['goodput_low']:.1%} to {summary['goodput_high']:.1%} in nine of ten"
    often = format_seconds(summary["seconds_between_failures"])
    rows = [
        ("played", f"{summary['days']:,.1f} days, {summary['runs']} times, with a failure every {often}"),
        ("nodes", f"{summary['nodes']:,}, and {summary['spares']} spare"),
        (
            "failures",
            f"{summary['failures']:,.0f}; no spare node was left after {summary['without_spare']:.1%}",
        ),
        ("checkpoints", f"every {summary['steps_between_checkpoints']:,} steps"),
        ("goodput", f"{summary['goodput']:.2%}, {spread}"),
    ]
    lost = [[name, f"{share:.2%}"] for name, share in summary["lost"].items()]
    return f"{labelled(rows)}\n\n{table_of(['lost by', 'of the time'], lost)}"


_MOST_ROWS = 16  # ranks along the pipeline that are printed; --json has all

_MEMORY = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "working",
)  # parts to print; --json has all

_DESCRIPTION = f"""\
Predicts a step under a Plan: its duration, where the time goes, the memory it needs. Simulates the schedule
with the costs of the model's blocks on the cluster's devices and links: compute, exposed communication within
blocks, messages between stages, communication of gradients and weights beside compute, and the optimizer. It
simulates one rank for each place along the pipeline; ranks that differ along other axes do the same work.

The model is a preset, such as llama3-8b, or a .json file of a traced model. The cluster is a preset, such as
dgx-h100:64, or a .toml file; without a number it has as many devices as the Plan has ranks.

{paragraph(MFU, indent="")}

Exit codes: 0 predicted; 2 wrong input, or the Plan does not fit in memory (the prediction is still printed).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = _DESCRIPTION
    parser.add_argument(
        "--plan", metavar="PLAN", required=True, help="a Plan, such as dp=8,tp=8,pp=4,precision=bf16"
    )
    add_workload(parser)
    parser.add_argument("--batch", metavar="N", type=int, required=True, help="sequences in a step")
    add_outlook(parser)
    add_failures(parser)
    parser.add_argument(
        "--slow",
        metavar="WORKER=FACTOR",
        action="append",
        default=[],
        help="also say what it costs if a worker, a replica of the model, computes so many times as long; "
        "may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="also write the timeline for Perfetto or chrome://tracing"
    )
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also draw the forwards and backwards")


def run(args: argparse.Namespace) -> int:
    """Print the prediction.

    Raises:
        PlanError: The Plan cannot be read, or does not fit the devices, the batch, the model or memory. The
            error about memory comes after the prediction is printed.
        ModelError: There is no such model.
        ClusterError: There is no such cluster, or it lacks a figure that offload needs.
        UserError: A file cannot be read or written.
    """
    from shoal.predict.cost import memory_of
    from shoal.predict.simulate import picture, simulate
    from shoal.spec.cluster import Cluster, devices_of
    from shoal.spec.plan import Plan
    from shoal.spec.timeline import write_chrome_trace

    plan = Plan.parse(args.plan)
    cluster = as_asked(Cluster.parse(args.cluster), args)
    if ":" not in args.cluster:
        cluster = cluster.with_devices(plan.ranks)
    workload = open_workload(args.model, args.sequence, cluster)
    for told in {device.computes_instead(plan.precision): 0 for device in devices_of(cluster)}:
        if told:
            print(f"warning: {told}", file=sys.stderr)
    simulation = simulate(workload, cluster, plan, args.batch)
    memory = memory_of(workload, simulation.plan, args.batch, cluster)
    if args.trace is not None:
        timeline = simulation.timeline
        write_file("trace", args.trace, "--trace", lambda path: write_chrome_trace(timeline, path))
    if args.svg is not None:
        title = f"{workload.name}, {simulation.plan}"
        write_text("picture", args.svg, "--svg", picture(simulation, title))
    run = long_run_of(args, workload, cluster, simulation.seconds, args.batch)
    summary = _summary(simulation, memory) | (
        {"long_run": long_run_summary(run, cluster)} if run is not None else {}
    )
    played = failures_summary(args.failures, run, cluster, simulation.plan, simulation.seconds)
    if played is not None:
        summary["failures"] = played
    if args.slow:
        summary["workers"] = _workers_summary(simulation, args.slow)
    if simulation.plan.tiers.moved:
        summary["offload"] = _offload_summary(simulation)
    if args.json:
        print(as_json(summary))
    else:
        print(_text(summary) + (f"\n\n{long_run_text(run, cluster)}" if run is not None else ""))
        if played is not None:
            print(f"\n{failures_text(played)}")
        if args.slow:
            print(f"\n{_workers_text(summary['workers'], args.slow)}")
        if "offload" in summary:
            print(f"\n{_offload_text(summary['offload'])}")
    if not summary["fits"]:
        raise _does_not_fit(summary, args)
    return 0


def _workers_summary(simulation: Simulation, slow: Sequence[str]) -> dict[str, Any]:
    """Return what slower workers cost, as an object for JSON."""
    from shoal.predict.simulate import uneven_course

    slower = {}
    for text in slow:
        worker, equals, factor = text.partition("=")
        try:
            slower[int(worker)] = float(factor)
        except ValueError:
            equals = ""
        if not equals or not slower[int(worker)] > 0:
            raise ConfigError(
                f"--slow {text} cannot be read",
                possible="a worker and a factor above 0, such as 0=3",
                change="write, for example, --slow 0=3",
            )
    uneven = uneven_course(simulation, slower)
    length, course = simulation.workload.length, uneven.course
    return {
        "tokens_per_second": uneven.uneven * length,
        "tokens_per_second_if_alike": uneven.even * length,
        "staleness": {"mean": course.mean_staleness, "most": max(course.staleness)},
        "workers": [
            {"worker": worker, "share_of_samples": made / sum(course.shares), "computing": computing}
            for worker, (made, computing) in enumerate(zip(course.shares, course.computing, strict=True))
        ],
    }


def _workers_text(summary: Mapping[str, Any], slow: Sequence[str]) -> str:
    now, alike = summary["tokens_per_second"], summary["tokens_per_second_if_alike"]
    mean, most = summary["staleness"]["mean"], summary["staleness"]["most"]
    heading = (
        f"with --slow {' '.join(slow)}: {now:,.0f} tokens/s, {now / alike:.0%} of {alike:,.0f} with workers "
        f"that are alike; staleness {mean:.1f} updates in the mean, {most} at most"
    )
    rows = [
        [str(each["worker"]), f"{each['share_of_samples']:.1%}", f"{each['computing']:.1%}"]
        for each in summary["workers"]
    ]
    return f"{paragraph(heading)}\n{table_of(['worker', 'of the samples', 'computing'], rows)}"


def _offload_summary(simulation: Simulation) -> dict[str, Any]:
    """Return the effect of the Plan's `offload` on the rank that it slows most, as an object for JSON.

    Raises:
        ClusterError: See `shoal.predict.cost.Costs.offload`.
    """
    from shoal.predict.cost import Costs

    costs, plan = Costs(simulation.workload, simulation.cluster), simulation.plan
    count = plan.microbatches_of(simulation.batch)
    found = max((costs.offload(plan, place, count) for place in range(plan.pp)), key=lambda each: each.extra)
    return {
        "places": plan.tiers.moved,
        "extra_seconds": found.extra,
        "exposed_seconds": dict(found.parts),
        "replaced_seconds": found.replaced,
        "link_bytes": found.link_bytes,
        "file_bytes": found.file_bytes,
        "host_bytes": found.host_bytes,
    }


def _offload_text(summary: Mapping[str, Any]) -> str:
    """Return what offload costs and moves, as lines of text."""
    exposed = ", ".join(
        f"{name} {format_seconds(value)}" for name, value in summary["exposed_seconds"].items()
    )
    size = {name: format_bytes(round(summary[f"{name}_bytes"])) for name in ("link", "file", "host")}
    moved = [f"{size['link']} over its link"] * bool(summary["link_bytes"])
    moved += [f"{size['file']} of files"] * bool(summary["file_bytes"])
    return "\n".join(
        (
            f"offload adds {format_seconds(summary['extra_seconds'])} to the step: exposed {exposed}; it "
            f"replaces {format_seconds(summary['replaced_seconds'])} of the optimizer",
            f"  a device moves {' and '.join(moved) or 'nothing'} in a step; a host keeps {size['host']}",
        )
    )


def _does_not_fit(summary: Mapping[str, Any], args: argparse.Namespace) -> PlanError:
    fullest, of_device = _fullest(summary)
    needed, there = (format_bytes(round(size)) for size in (fullest["peak_bytes"], of_device))
    largest = max(fullest["parts"], key=lambda part: fullest["parts"][part])
    words = f"--model {args.model} --cluster {args.cluster} --batch {args.batch}"
    return PlanError(
        f"the Plan does not fit: place {fullest['place']} needs {needed}, most of it for {largest}; a device "
        f"has {there}",
        possible="shard=zero3, tp, pp, a smaller microbatch, recompute=full, or more devices",
        change=f"choose a Plan that fits with: shoal plan {words}",
    )


def _summary(simulation: Simulation, memory: Sequence[RankMemory]) -> dict[str, Any]:
    from shoal.predict.simulate import traffic_of
    from shoal.spec.cluster import counts_of

    workload, cluster, plan = simulation.workload, simulation.cluster, simulation.plan
    traffic = traffic_of(workload, cluster, plan, simulation.batch)
    return {
        "model": workload.name,
        "parameters": workload.parameters,
        "plan": str(plan),
        "cluster": cluster.name,
        "devices": plan.ranks,
        **({"kinds": kinds} if len(kinds := counts_of(cluster)) > 1 else {}),
        "batch": simulation.batch,
        "sequence": workload.length,
        "step_seconds": simulation.seconds,
        **band_summary(workload, cluster, plan, simulation.seconds),
        "tokens_per_second": simulation.tokens_per_second,
        "tokens_per_second_per_device": simulation.tokens_per_second_per_device,
        "mfu": simulation.mfu,
        "mfu_counts": MFU,
        "memory": [
            {
                "place": each.rank,
                "peak_bytes": each.peak,
                "moment": each.moment,
                "parts": dict(each.parts),
                "fits": each.fits(cluster),
                **_of_device(each, cluster),
            }
            for each in memory
        ],
        "fits": all(each.fits(cluster) for each in memory),
        "device_memory": cluster.device.memory,
        "breakdown": breakdown_summary(simulation.breakdown, None),
        "exchanges": traffic_summary(traffic, simulation.exposed(traffic.rank)),
    }


def _of_device(memory: RankMemory, cluster: Cluster) -> dict[str, float]:
    """Return the bytes of the smallest device that a rank sits on, where it is not the Cluster's."""
    return {} if memory.tightness == 1 else {"device_memory": cluster.device.memory / memory.tightness}


def _fullest(summary: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """Return the rank that takes the largest share of its device, and the bytes of that."""

    def of_device(each: Mapping[str, Any]) -> float:
        return float(each.get("device_memory", summary["device_memory"]))

    fullest = max(summary["memory"], key=lambda each: each["peak_bytes"] / of_device(each))
    return fullest, of_device(fullest)


def _text(summary: Mapping[str, Any]) -> str:
    breakdown = summary["breakdown"]
    paragraphs = [_heading(summary), parts_text(breakdown)]
    if len(breakdown["ranks"]) > 1:
        paragraphs.append(ranks_text(dict(list(breakdown["ranks"].items())[:_MOST_ROWS])))
    if breakdown["collectives"]:
        paragraphs.append(collectives_text(breakdown["collectives"]))
    if summary["exchanges"]:
        paragraphs.append(traffic_text(summary["exchanges"]))
    paragraphs.append(_memory_text(summary["memory"]))
    paragraphs.append(paragraph(MFU))
    return "\n\n".join(paragraphs)


def _kinds_text(summary: Mapping[str, Any]) -> str:
    """Return the kinds of devices; nothing if all are equal."""
    each = [f"{number:,} x {name}" for name, number in summary.get("kinds", {}).items()]
    return f": {', '.join(each)}" if each else ""


def _heading(summary: Mapping[str, Any]) -> str:
    fullest, of_device = _fullest(summary)
    fits = "fits" if summary["fits"] else "DOES NOT FIT"
    rows = [
        ("model", f"{summary['model']}, {format_count(summary['parameters'])} parameters"),
        ("plan", summary["plan"]),
        ("cluster", f"{summary['cluster']}, {summary['devices']} devices{_kinds_text(summary)}"),
        ("batch", f"{summary['batch']} x {summary['sequence']} tokens"),
        ("step", f"{format_seconds(summary['step_seconds'])}, {band_text(summary)}"),
        ("tokens/s", f"{summary['tokens_per_second']:,.0f}"),
        ("tokens/s/device", f"{summary['tokens_per_second_per_device']:,.0f}"),
        ("MFU", f"{summary['mfu']:.1%}"),
        (
            "memory",
            f"{format_bytes(round(fullest['peak_bytes']))} of {format_bytes(round(of_device))}, {fits}",
        ),
    ]
    return labelled(rows)


def _memory_text(memory: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in _MEMORY if any(each["parts"].get(name) for each in memory)]
    rows = [
        [
            str(each["place"]),
            format_bytes(round(each["peak_bytes"])),
            *(format_bytes(round(each["parts"].get(name, 0))) for name in names),
            format_bytes(round(sum(size for name, size in each["parts"].items() if name not in names))),
            each["moment"],
        ]
        for each in memory[:_MOST_ROWS]
    ]
    return table_of(["memory of place", "peak", *names, "rest", "at"], rows)
