"""Fits the constants of links to published times of collectives, and tells how well they predict them.

    python benchmarks/fit_links.py TABLE.csv ...        errors with the constants of
    shoal/spec/cluster/links.toml python benchmarks/fit_links.py TABLE.csv ... --fit  constants fitted to half
    of the rows, and their errors

The tables are those of `shoal validate`: sweeps of platforms, and operations measured on devices of one node.
Half of the rows, chosen by a hash of what was run, are fitted; the others only tell whether the constants
hold. A row that says which algorithm ran is held to that one, the others to the quickest. Buffers of up to
256 KiB weigh a quarter of larger ones.

What is fitted belongs to a type of link, never to a platform. Two nodes alone are joined by trees that load
each interface half as much as larger rings do (shoal.predict.cost.collectives.network says why), so they tell
little of rings: half sizes of networks but TCP are not fitted. Sweeps of two nodes want 11 to 19 MB, the only
one of four nodes none. Latencies are of each network; those of NVLink 3 and 4 are NCCL's. Shares of networks
are not fitted: 0.97 of a packet is payload.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from shoal.cli.table import table_of
from shoal.predict.cost.collectives import algorithm_seconds
from shoal.predict.validate import MeasuredCollective, is_fitted, read_collectives
from shoal.predict.validate.collectives import SMALL_BYTES
from shoal.spec.cluster import Cluster
from shoal.spec.cluster.tables import table
from shoal.spec.plan.group import Group

NVLINKS = ("nvlink3", "nvlink4", "nvlink5")
SWITCHES = ("nvlink4", "nvlink5")  # that add up
TCP = ("tcpx", "tcpxo")  # slower for all sizes below 100 MB; swept on two nodes alone

OF_NVLINKS = (
    "share",
    "exchange_share",
    "setup",
    "packet_latency",
    "packet_share",
    "half_size",
    "copy_rate",
)
OF_SWITCHES = ("reduction_share", "reduction_start")

PARAMETERS: tuple[tuple[tuple[str, ...], str], ...] = (
    *(((link,), name) for link in NVLINKS for name in OF_NVLINKS),
    *(((link,), name) for link in SWITCHES for name in OF_SWITCHES),
    (("nvlink5",), "latency"),
    (("xgmi3",), "share"),
    *(((link,), "latency") for link in ("efa1", "efa2", "efa4")),
    *((TCP, name) for name in ("latency", "half_size")),
)
"""What is fitted: types of links, and the constant that they share."""

_SHARES = ("share", "exchange_share", "packet_share", "reduction_share")
_ROUNDS = 40  # of the search; errors change by less than 0.1 % after 30
_SMALL_WEIGHT = 0.25

Constants = Mapping[tuple[str, str], float]
"""By type of link and name."""


@dataclass(frozen=True)
class Timed:
    """A row, and the types of its links, innermost first."""

    row: MeasuredCollective
    links: tuple[str, ...]

    @classmethod
    def of(cls, row: MeasuredCollective) -> Timed:
        """Look up the links of a row's node."""
        levels = table("nodes")[row.cluster.name]["levels"]
        return cls(row, tuple(level["link"] for level in levels))

    @property
    def weight(self) -> float:
        """Weight of the row's error."""
        return _SMALL_WEIGHT if self.row.nbytes <= SMALL_BYTES else 1.0

    def machine(self, constants: Constants) -> Cluster:
        """Return the row's machine, with some constants changed."""
        levels = tuple(
            replace(level, **_constants_of(link, constants))
            for level, link in zip(self.row.cluster.levels, self.links, strict=True)
        )
        return self.row.cluster.replace(levels=levels)

    def error(self, cluster: Cluster) -> float:
        """Return predicted / measured - 1 on a machine."""
        group = Group(cluster.devices)
        seconds = algorithm_seconds(self.row.collective, self.row.nbytes, group, cluster)
        return self.row.predicted(seconds) / self.row.seconds - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", metavar="TABLE.csv", nargs="+")
    parser.add_argument(
        "--fit", action="store_true", help="fit constants rather than take those of the package"
    )
    args = parser.parse_args()
    rows = [Timed.of(row) for path in args.tables for row in read_collectives(path)]
    fitted = [each for each in rows if is_fitted(each.row)]
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
    others = [each for each in rows if not is_fitted(each.row)]
    for name, chosen in (("fitted half", fitted), ("other half", others), ("all", rows)):
        mean = fmean(map(abs, errors(chosen, constants)))
        print(f"{name}: {len(chosen)} rows, mean error {mean:.1%}")


def _constants_of(link: str, constants: Constants) -> dict[str, Any]:
    return {name: value for (of, name), value in constants.items() if of == link}


def fit(rows: Sequence[Timed]) -> dict[tuple[str, str], float]:
    """Constants of least mean error: one at a time is moved by a factor, while that helps; else by less."""
    constants = {
        (link, name): float(table("links")[link][name]) for links, name in PARAMETERS for link in links
    }
    weighted = _weighted(rows, constants)
    factors = dict.fromkeys(PARAMETERS, 1.35)
    for _ in range(_ROUNDS):
        for parameter in PARAMETERS:
            links, name = parameter
            concerned = [index for index, each in enumerate(rows) if set(links) & set(each.links)]
            least = math.fsum(weighted[index] for index in concerned)
            for factor in (factors[parameter], 1 / factors[parameter]):
                value = constants[links[0], name] * factor
                if name in _SHARES and value > 1:
                    continue
                tried = constants | {(link, name): value for link in links}
                found = _weighted([rows[index] for index in concerned], tried)
                if math.fsum(found) < least:
                    constants = tried
                    for index, each in zip(concerned, found, strict=True):
                        weighted[index] = each
                    factors[parameter] **= 1.3
                    break
            else:
                factors[parameter] = math.sqrt(factors[parameter])
    return constants


def _weighted(rows: Sequence[Timed], constants: Constants) -> list[float]:
    return [each.weight * abs(error) for each, error in zip(rows, errors(rows, constants), strict=True)]


def errors(rows: Sequence[Timed], constants: Constants) -> list[float]:
    """Return predicted / measured - 1 of each row; rows on equal machines share one cluster."""
    made: dict[tuple[str, int, int], Cluster] = {}
    found = []
    for each in rows:
        key = (each.row.cluster.name, each.row.cluster.devices, each.row.cluster.devices_per_node)
        if key not in made:
            made[key] = each.machine(constants)
        found.append(each.error(made[key]))
    return found


def print_errors(rows: Sequence[Timed], constants: Constants) -> None:
    """A line for each platform and collective, small buffers apart from others, and number of ranks."""
    groups: dict[tuple[str, str, int, int], list[float]] = {}
    for each, error in zip(rows, errors(rows, constants), strict=True):
        row = each.row
        nodes = -(-row.cluster.devices // row.cluster.devices_per_node)
        key = (row.platform, row.quantity, nodes, row.cluster.devices)
        groups.setdefault(key, []).append(error)
    lines = []
    for (platform, collective, nodes, ranks), found in groups.items():
        sizes = sorted(map(abs, found))
        tenth = sizes[math.ceil(0.9 * len(sizes)) - 1]
        counts = [str(each) for each in (nodes, ranks, len(found))]
        lines.append(
            [platform, collective, *counts, f"{fmean(sizes):.1%}", f"{tenth:.1%}", f"{fmean(found):+.1%}"]
        )
    head = ["platform", "collective", "nodes", "ranks", "rows", "mean error", "90th percentile", "bias"]
    print(table_of(head, lines))
    print()


if __name__ == "__main__":
    main()
