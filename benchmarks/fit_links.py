"""Fits the constants of links to published times of collectives, and tells how well they predict them.

    python benchmarks/fit_links.py TABLE.csv          errors with the constants of shoal/cluster/links.toml
    python benchmarks/fit_links.py TABLE.csv --fit    constants fitted to half of the rows, and their errors

Half of the rows, chosen by a hash of what was run, are fitted; the others only tell whether the constants
hold. Rows count that say how many nodes and ranks took part, from 64 KiB. A row that says which algorithm ran
is held to that one, the others to the quickest.

What is fitted belongs to a type of link, never to a platform. Two nodes alone are joined by trees that load
each interface half as much as larger rings do (shoal.cost.collectives.network says why), so they tell
little of rings: all networks but TCP share one half size, fitted to sweeps of more nodes too. Latencies are
of each network. Shares of networks are not fitted: 0.97 of a packet is payload.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from shoal.cli.table import table_of
from shoal.cluster.tables import table
from shoal.cost.collectives import algorithm_seconds
from shoal.plan.groups import Group
from shoal.validate import MeasuredCollective, is_fitted, read_collectives

NETWORKS = ("infiniband", "roce", "efa1", "efa2", "efa3", "efa4")
TCP = ("tcpx", "tcpxo")  # slower for all sizes below 100 MB; swept on two nodes alone

PARAMETERS: tuple[tuple[tuple[str, ...], str], ...] = (
    *(
        ((link,), name)
        for link in ("nvlink3", "nvlink4", "nvlink5")
        for name in ("share", "setup", "half_size")
    ),
    *(((link,), "reduction_share") for link in ("nvlink4", "nvlink5")),
    (("xgmi3",), "share"),
    (NETWORKS, "half_size"),
    *(((link,), "latency") for link in ("efa1", "efa2", "efa4")),
    *((TCP, name) for name in ("latency", "half_size")),
)
"""What is fitted: types of links, and the constant that they share."""

_SHARES = ("share", "reduction_share")
_ROUNDS = 25  # of the search; errors change by less than 0.1 % after 15

Constants = Mapping[tuple[str, str], float]
"""By type of link and name."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", metavar="TABLE.csv")
    parser.add_argument(
        "--fit", action="store_true", help="fit constants rather than take those of the package"
    )
    args = parser.parse_args()
    rows = read_collectives(args.table)
    fitted = [row for row in rows if is_fitted(row)]
    constants: dict[tuple[str, str], float] = {}
    if args.fit:
        constants = fit(fitted)
        print(
            table_of(
                ["link", "constant", "value"], [[*key, f"{value:.3g}"] for key, value in constants.items()]
            )
        )
        print()
    print_errors(rows, constants)
    others = [row for row in rows if not is_fitted(row)]
    for name, chosen in (("fitted half", fitted), ("other half", others), ("all", rows)):
        print(f"{name}: {len(chosen)} rows, mean error {error(chosen, constants):.1%}")


def predict(row: MeasuredCollective, constants: Constants) -> float:
    """Seconds, with some constants changed."""
    links = [level["link"] for level in table("nodes")[row.cluster.name]["levels"]]
    levels = tuple(
        replace(level, **_constants_of(link, constants))
        for level, link in zip(row.cluster.levels, links, strict=True)
    )
    cluster = row.cluster.replace(levels=levels)
    seconds = algorithm_seconds(row.collective, row.nbytes, Group(cluster.devices), cluster)
    return seconds[row.algorithm] if row.algorithm else min(seconds.values())


def _constants_of(link: str, constants: Constants) -> dict[str, Any]:
    return {name: value for (of, name), value in constants.items() if of == link}


def error(rows: Sequence[MeasuredCollective], constants: Constants) -> float:
    """Mean of the errors, relative to what was measured, regardless of sign."""
    return fmean(abs(predict(row, constants) / row.seconds - 1) for row in rows)


def fit(rows: Sequence[MeasuredCollective]) -> dict[tuple[str, str], float]:
    """Constants of least mean error: one at a time is moved by a factor, while that helps; else by less."""
    constants = {
        (link, name): float(table("links")[link][name]) for links, name in PARAMETERS for link in links
    }
    least = error(rows, constants)
    factors = dict.fromkeys(PARAMETERS, 1.35)
    for _ in range(_ROUNDS):
        for parameter in PARAMETERS:
            links, name = parameter
            for factor in (factors[parameter], 1 / factors[parameter]):
                value = constants[links[0], name] * factor
                if name in _SHARES and value > 1:
                    continue
                tried = constants | {(link, name): value for link in links}
                found = error(rows, tried)
                if found < least:
                    constants, least = tried, found
                    factors[parameter] **= 1.3
                    break
            else:
                factors[parameter] = math.sqrt(factors[parameter])
    return constants


def print_errors(rows: Sequence[MeasuredCollective], constants: Constants) -> None:
    """A line for each platform and collective."""
    groups: dict[tuple[str, str, int, int], list[float]] = {}
    for row in rows:
        nodes = row.cluster.devices // row.cluster.devices_per_node
        key = (row.platform, row.collective, nodes, row.cluster.devices)
        groups.setdefault(key, []).append(predict(row, constants) / row.seconds - 1)
    lines = []
    for (platform, collective, nodes, ranks), errors in groups.items():
        sizes = sorted(map(abs, errors))
        tenth = sizes[math.ceil(0.9 * len(sizes)) - 1]
        counts = [str(each) for each in (nodes, ranks, len(errors))]
        lines.append(
            [platform, collective, *counts, f"{fmean(sizes):.1%}", f"{tenth:.1%}", f"{fmean(errors):+.1%}"]
        )
    head = ["platform", "collective", "nodes", "ranks", "rows", "mean error", "90th percentile", "bias"]
    print(table_of(head, lines))
    print()


if __name__ == "__main__":
    main()
