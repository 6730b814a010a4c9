"""`shoal simulate --failures`: a long run whose nodes fail by chance, many times over."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.cli.table import labelled, table_of
from shoal.errors import ClusterError, ConfigError, nearest
from shoal.units import format_seconds

if TYPE_CHECKING:
    from shoal.cluster import Cluster
    from shoal.cost.outlook import LongRun
    from shoal.plan import Plan
    from shoal.simulate import FailureModel

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
    from shoal.simulate import failure_courses

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
    from shoal.simulate import FailureModel

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
