"""Options and output about long runs: days, money, failures, checkpoints, stragglers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.table import paragraph, table_of
from shoal.errors import ClusterError, ConfigError
from shoal.units import format_bytes, format_count, format_seconds, parse_count

if TYPE_CHECKING:
    from shoal.predict.cost.outlook import LongRun
    from shoal.predict.simulate import Traffic
    from shoal.spec.cluster import Cluster
    from shoal.spec.plan import Plan
    from shoal.spec.workload import Workload


_DAY = 86400.0


def add_outlook(parser: argparse.ArgumentParser) -> None:
    """Add the options for a long run, and for how much ranks vary."""
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--tokens",
        metavar="N",
        help="also predict days, money and failures of a run of N tokens, such as 15T",
    )
    length.add_argument("--steps", metavar="N", type=int, help="also predict these for a run of N steps")
    parser.add_argument(
        "--storage", metavar="RATE", help="bytes/s from a node to the storage of checkpoints (default 1G)"
    )
    parser.add_argument(
        "--restart",
        metavar="SECONDS",
        type=float,
        help="seconds from a failure until ranks load a checkpoint (default 300)",
    )
    parser.add_argument(
        "--jitter",
        metavar="SHARE",
        type=float,
        help="standard deviation of a rank's step time over its mean, such as 0.02 (default: the cluster's)",
    )
    parser.add_argument(
        "--price",
        metavar="KIND",
        help="on-demand, reserved or spot (default on-demand); spot devices are interrupted, too",
    )


def as_asked(cluster: Cluster, args: argparse.Namespace) -> Cluster:
    """Return the Cluster with the memory and the jitter, and at the price, that were asked for.

    Raises:
        ConfigError: The memory cannot be read.
        ClusterError: The jitter or the memory is out of range, or there is no such price.
    """
    from shoal.spec.cluster import limited, priced

    asked = limited(cluster, args.memory)
    asked = asked if args.jitter is None else asked.replace(jitter=args.jitter)
    return asked if args.price is None else priced(asked, args.price)


def long_run_of(
    args: argparse.Namespace, workload: Workload, cluster: Cluster, step: float, batch: int
) -> LongRun | None:
    """Return the long run that the arguments ask for; None if they ask for none.

    Raises:
        ConfigError: A number cannot be read, or is out of range.
        ClusterError: The arguments ask about failures, but the Cluster does not say how often devices fail.
    """
    from shoal.predict.cost.outlook import RESTART, STORAGE, long_run

    about_failures = [name for name in ("storage", "restart") if getattr(args, name) is not None]
    if args.tokens is None and args.steps is None:
        if about_failures:
            raise ConfigError(
                f"--{about_failures[0]} was given without the length of a run",
                possible="--storage and --restart together with --tokens or --steps",
                change="add the length of the run, such as --tokens 15T",
            )
        return None
    if about_failures and not cluster.failures:
        raise ClusterError(
            f"--{about_failures[0]} was given, and {cluster.name} does not say how often devices fail",
            possible="a Cluster that has `failures`, per device and hour, such as 2e-5",
            change="add `failures` to the Cluster's file, or leave out --storage and --restart",
        )
    return long_run(
        workload,
        cluster,
        step,
        batch * workload.length,
        steps=args.steps,
        tokens=_count("tokens", args.tokens),
        storage=_count("storage", args.storage) or STORAGE,
        restart=RESTART if args.restart is None else args.restart,
    )


def _count(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        found = parse_count(text.replace("G", "B"))
    except ValueError as error:
        raise ConfigError(
            f"--{name} {text} is not a number",
            possible="a number such as 300B, 15T or 2e9",
            change=f"correct --{name}",
        ) from error
    if not 0 < found < math.inf:
        raise ConfigError(
            f"--{name} {text} is out of range", possible="a number above 0", change=f"correct --{name}"
        )
    return found


def long_run_summary(run: LongRun, cluster: Cluster) -> dict[str, Any]:
    """Return an object for JSON; null is a value that is not known, or infinite."""
    goodput = run.goodput
    fails = math.isfinite(goodput.between_failures)
    return {
        "steps": run.steps,
        "tokens": run.tokens,
        "step_seconds": goodput.step,
        "days": run.days,
        "dollars": run.dollars or None,
        "kilowatt_hours": _energy(run, cluster),
        "goodput": goodput.share if fails else None,
        "failures": run.failures if fails else None,
        "seconds_between_failures": goodput.between_failures,
        "steps_between_checkpoints": goodput.interval if fails else None,
        "checkpoint_bytes": run.checkpoint,
        "save_seconds": run.save,
        "restart_seconds": run.restart,
        "shares": {
            "training": goodput.share,
            "saving": goodput.saving,
            "restarting": goodput.restarting,
            "lost": goodput.lost,
        }
        if fails
        else None,
    }


def _energy(run: LongRun, cluster: Cluster) -> float | None:
    """Return the kilowatt hours of a run on a Cluster; None if they are not known, or without limit."""
    from shoal.spec.cluster import kilowatt_hours

    if not cluster.power.device or not math.isfinite(run.days):
        return None
    return kilowatt_hours(cluster, run.days * _DAY)


def long_run_text(run: LongRun, cluster: Cluster) -> str:
    """Return the long run in words."""
    return "\n".join(map(paragraph, [_length_text(run, cluster), *_failures_text(run)]))


def _length_text(run: LongRun, cluster: Cluster) -> str:
    goodput = run.goodput
    length = f"{format_count(run.tokens)} tokens are {run.steps:,} steps of {format_seconds(goodput.step)}"
    if not math.isfinite(run.days):
        return f"{length}, and never end: failures undo more than the steps between them do."
    money = f"${run.dollars:,.0f}" if goodput.price else "dollars unknown: the cluster has no price"
    energy = _energy(run, cluster)
    power = "" if energy is None else f", {energy:,.0f} kWh"
    return f"{length}: {run.days:,.1f} days, {money}{power}."


def _failures_text(run: LongRun) -> list[str]:
    goodput = run.goodput
    if not math.isfinite(goodput.between_failures):
        return ["The cluster does not say how often devices fail, so failures are not counted."]
    total = f"{run.failures:,.0f} in all" if math.isfinite(run.failures) else "without limit"
    return [
        f"A device fails every {format_seconds(goodput.between_failures)}, {total}; it takes "
        f"{format_seconds(run.restart)} to restart.",
        f"A checkpoint of {format_bytes(round(run.checkpoint))} takes {format_seconds(run.save)}; "
        f"it is best to save one every {goodput.interval:,} steps, "
        f"{format_seconds(goodput.interval * goodput.step)}.",
        f"Goodput {goodput.share:.1%}: {goodput.saving:.1%} of the time goes into saving, "
        f"{goodput.restarting:.1%} into restarts, {goodput.lost:.1%} into steps that are repeated.",
    ]


ASIDE = "90 % in"
"""Head of the column that `aside` fills."""


def band_summary(workload: Workload, cluster: Cluster, plan: Plan, seconds: float) -> dict[str, Any]:
    """Return the band of a step with these predicted seconds, as `--json` has it."""
    from shoal.predict.cost.outlook import band_of

    band = band_of(workload, cluster, plan)
    low, high = band.around(seconds)
    return {"step_seconds_low": low, "step_seconds_high": high, "validated": band.validated}


def aside(summary: Mapping[str, Any], seconds: float) -> str:
    """Return how far the two ends of a band are from the predicted seconds."""
    low, high = (summary[f"step_seconds_{end}"] / seconds - 1 for end in ("low", "high"))
    return f"{low:+.0%} {high:+.0%}"


def band_text(summary: Mapping[str, Any]) -> str:
    """Return the words about the band of a step."""
    low, high = (format_seconds(summary[f"step_seconds_{end}"]) for end in ("low", "high"))
    return f"90 % within {low} to {high} ({summary['validated']})"


def traffic_summary(traffic: Traffic, exposed: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the exchanges of a rank as objects for JSON.

    Args:
        traffic: Traffic of the rank.
        exposed: Exposed seconds of a step by purpose. All exchanges for a purpose have the same share of its
            seconds; for purposes that are not in it, they are not known.
    """
    totals = {purpose: traffic.seconds(purpose) for purpose in exposed}
    shares = {name: min(1.0, exposed[name] / total) for name, total in totals.items() if total > 0}
    return [
        {
            "exchange": each.name,
            "purpose": each.purpose,
            "bytes": each.bytes,
            "ranks": each.ranks,
            "level": each.level,
            "algorithm": each.algorithm,
            "seconds": each.seconds,
            "times": each.times,
            "exposed_share": shares.get(each.purpose),
        }
        for each in traffic.exchanges
    ]


def traffic_text(exchanges: Sequence[Mapping[str, Any]]) -> str:
    """Return the result of `traffic_summary` as a table."""
    return table_of(
        ["exchanged in a step", "for", "bytes", "ranks", "over", "algorithm", "each", "times", "exposed"],
        [
            [
                each["exchange"],
                each["purpose"],
                format_bytes(round(each["bytes"])),
                str(each["ranks"]),
                each["level"],
                each["algorithm"],
                format_seconds(each["seconds"]),
                f"{each['times']:,}",
                "-" if each["exposed_share"] is None else f"{each['exposed_share']:.0%}",
            ]
            for each in exchanges
        ],
    )
