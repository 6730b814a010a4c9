"""Fits the bands of predicted steps to held-out rows, and measures how many rows lie within them.

    python benchmarks/fit_bands.py RUNS.csv ... [--without FAMILY ...] [--out
        shoal/predict/cost/outlook/bands.toml] [--probed CLUSTER.toml TABLE.csv] [--cores
        benchmarks/prediction.md]

RUNS.csv are tables of `shoal validate`. Only rows that no constant is fitted to count
(`shoal.predict.validate.is_fitted`), and a row that several tables have counts once.

The band of a kind reaches from the 5 % to the 95 % quantile of log(measured / predicted). Rows of the next
wider kind are added with the weight of `_PARENT` rows together, so that few rows decide little. As the next
row may lie beyond all that were seen, each end leaves out 5 % of n + 1 of these n rows, as in split conformal
prediction (arXiv:1604.04173), where n counts the added weight.

Measured Clusters have bands of their own, each of one family. "probe": rows of TABLE.csv predicted with
CLUSTER.toml, and the page of `prediction.py` for cores. "runs": of a source, machine and program, one row
corrects the others by one factor, for every pair of held-out rows; on cores the column "calibrated" of the
page.

Prints the coverage: bands that are fitted to half of the rows, at random, hold so many of the other half. And
the coverage of sources: bands that are fitted without a source hold so many of its rows.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles

from shoal.predict.cost.outlook.band import kind_of, layouts_of, measured_kind
from shoal.predict.validate import Measured, published_workload, read_table
from shoal.predict.validate.predictions import compare_steps
from shoal.predict.validate.steps import machine_of
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan

__all__ = ["Row", "bands_of", "coverage", "main", "quantile"]

_TAIL = 0.05
_PARENT = 30.0  # weight of a wider kind's rows together, in rows
_FEWEST = 2  # rows of a kind with a band of its own
_SPLITS = 200


@dataclass(frozen=True, slots=True)
class Row:
    """A measured step beside its prediction.

    Attributes:
        kind: Path of words, from the widest kind to the narrowest.
        source: Rows with the same name come from one source.
        ratio: log(measured / predicted).
        weight: Number of rows that it counts as.
    """

    kind: tuple[str, ...]
    source: str
    ratio: float
    weight: float = 1.0


def quantile(rows: Iterable[tuple[float, float]], level: float) -> float:
    """Return the least value that at least `level` of the weight does not exceed.

    Args:
        rows: Values with their weights.
        level: Share of the weight, 0 to 1.
    """
    ordered = sorted(rows)
    wanted, passed = level * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= wanted - 1e-9:
            return value
    return ordered[-1][0]


def bands_of(rows: Sequence[Row]) -> dict[tuple[str, ...], tuple[float, float, int]]:
    """Return the lowest and highest ratio of each kind, and its number of rows."""
    by_kind: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        for length in range(1, len(row.kind) + 1):
            by_kind[row.kind[:length]].append(row)
    mixed: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    found = {}
    for kind in sorted(by_kind, key=lambda kind: (len(kind), kind)):
        own = [(row.ratio, row.weight) for row in by_kind[kind]]
        wider = mixed.get(kind[:-1], [])
        share = _PARENT / sum((weight for _, weight in wider), 0.0) if wider else 0.0
        mixed[kind] = own + [(value, weight * share) for value, weight in wider]
        if round(sum(weight for _, weight in own)) < _FEWEST and len(kind) > 1:
            continue
        count = sum(weight for _, weight in mixed[kind])
        high = min(1.0, (1 - _TAIL) * (1 + 1 / count))
        mirrored = [(-value, each) for value, each in mixed[kind]]
        found[kind] = -quantile(mirrored, high), quantile(mixed[kind], high), round(sum(w for _, w in own))
    return found


def coverage(fitted: Sequence[Row], tested: Sequence[Row]) -> float:
    """Return the share of rows that lie in the bands of others, each in that of its narrowest kind."""
    bands = bands_of(fitted)
    held = [(row.weight, _is_held(row, bands)) for row in tested]
    return sum(weight for weight, is_held in held if is_held) / sum(weight for weight, _ in held)


def _is_held(row: Row, bands: Mapping[tuple[str, ...], tuple[float, float, int]]) -> bool:
    paths = (row.kind[:length] for length in range(len(row.kind), 0, -1))
    kind = next((path for path in paths if path in bands), None)
    return kind is not None and bands[kind][0] <= row.ratio <= bands[kind][1]


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows of the tables of steps.

    Attributes:
        held_out: Rows that no constant is fitted to.
        devices, precisions, layouts, most: What any row had, fitted or not: names of devices; types by
            family; degrees and shardings; the most devices.
    """

    held_out: list[Row]
    devices: set[str]
    precisions: dict[str, set[str]]
    layouts: set[str]
    most: int


def _read(tables: Sequence[Path], without: Sequence[str]) -> _Table:
    """Predict the rows of tables; a row that several tables have counts once."""
    found = _Table([], set(), defaultdict(set), set(), 0)
    known = set()
    most = 0
    for table in tables:
        rows = {row.line: row for row in read_table(table) if row.family not in without}
        for compared in compare_steps(list(rows.values())):
            row = rows[compared.line]
            same = (row.family, str(row.shape.name), row.device, row.batch, compared.measured)
            if compared.quantity != "step" or same in known:
                continue
            known.add(same)
            plan, machine = SettledPlan.of(SettledPlan.parse(compared.plan), row.batch), machine_of(row)
            kind = _kind(row, plan, machine)
            found.devices.add(machine.device.name)
            found.precisions[kind[1]].add(row.products)
            found.layouts.update(layouts_of(plan))
            most = max(most, plan.ranks)
            if not compared.fitted:
                ratio = math.log(compared.measured / compared.predicted)
                found.held_out.append(Row(kind, f"{row.family} on {row.device}", ratio))
    return replace(found, most=most)


def _kind(row: Measured, plan: SettledPlan, machine: Cluster) -> tuple[str, ...]:
    return kind_of(published_workload(row), machine, plan, row.products)


def _corrected(rows: Sequence[Row]) -> list[Row]:
    """Return the ratios that are left after each other row of a source has corrected a row."""
    by_source: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source, row.kind[:3]].append(row)
    return [
        Row((f"runs on {row.kind[1]}",), row.source, row.ratio - other.ratio, 1 / (len(alike) - 1))
        for alike in by_source.values()
        for row in alike
        for other in alike
        if other is not row and row.kind[0] == "dense"
    ]


def _probed(cluster: Path, table: Path) -> list[Row]:
    """Return the held-out rows of a table, predicted with a Cluster of `shoal probe`."""
    machine = Cluster.read(cluster)
    return [
        Row((measured_kind("probe", machine),), each.family, math.log(each.measured / each.predicted))
        for each in compare_steps(read_table(table), cluster=machine)
        if each.quantity == "step" and not each.fitted
    ]


_LINE = re.compile(r"\| (\d+) \| (\w+) \| `.*` \|.*\| ([+-][\d.]+)% \| ([+-][\d.]+)% \|")


def _on_cores(page: Path) -> list[Row]:
    """Return the rows of the page of `prediction.py`: by the probe, and corrected by the first of a model."""
    rows, first = [], set()
    for ranks, model, probed, corrected in _LINE.findall(page.read_text("utf-8")):
        source = f"{ranks} ranks, {model}"
        rows.append(Row(("probe on cores",), source, -math.log1p(float(probed) / 100)))
        if source in first:
            rows.append(Row(("runs on cores",), source, -math.log1p(float(corrected) / 100)))
        first.add(source)
    return rows


def _by_halves(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Return the mean coverage of random halves, and its 5 % and 95 % quantiles over the splits."""
    found = []
    for seed in range(_SPLITS):
        mixed = random.Random(seed).sample(range(len(rows)), len(rows))
        halves = [[rows[index] for index in mixed[half::2]] for half in (0, 1)]
        found.append(coverage(halves[0], halves[1]))
    tails = quantiles(found, n=20)
    return fmean(found), tails[0], tails[-1]


def _by_source(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the share of rows in bands fitted without their source, and the median of the sources."""
    sources = sorted({row.source for row in rows})
    found = []
    for source in sources:
        own = [row for row in rows if row.source == source]
        found.append((coverage([row for row in rows if row.source != source], own), len(own)))
    return sum(share * count for share, count in found) / len(rows), median(share for share, _ in found)


def _toml(seen: _Table, bands: Mapping[tuple[str, ...], tuple[float, float, int]]) -> str:
    def texts(values: Iterable[str]) -> str:
        return "[" + ", ".join(f'"{value}"' for value in values) + "]"

    lines = [
        "# Bands of predicted steps: quantiles of log(measured / predicted) of held-out rows, by kind.",
        "# Written by benchmarks/fit_bands.py; docs/guides/validate.md has the command and the coverage.",
        "",
        "[seen]  # what any measured row had",
        f"devices = {texts(sorted(seen.devices))}",
        f"layouts = {texts(sorted(seen.layouts))}",
        f"most = {seen.most}",
        "",
        "[seen.precisions]",
        *(f'"{family}" = {texts(sorted(found))}' for family, found in sorted(seen.precisions.items())),
    ]
    for kind, (low, high, rows) in bands.items():
        lines += ["", "[[bands]]", f"kind = {texts(kind)}"]
        lines += [f"low = {low:.4f}", f"high = {high:.4f}", f"rows = {rows}"]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the bands, and print them with their coverage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="measured steps")
    parser.add_argument("--without", nargs="+", default=(), metavar="FAMILY", help="rows to leave out")
    parser.add_argument("--probed", type=Path, nargs=2, metavar=("CLUSTER.toml", "TABLE.csv"))
    parser.add_argument("--cores", type=Path, metavar="PAGE.md", help="the page of prediction.py")
    parser.add_argument("--out", type=Path, metavar="BANDS.toml", help="file to write")
    options = parser.parse_args(arguments)
    seen = _read(options.runs, options.without)
    rows = seen.held_out
    measured = _corrected(rows)
    measured += _probed(*options.probed) if options.probed else []
    measured += _on_cores(options.cores) if options.cores else []
    bands = bands_of([*rows, *measured])
    print("| kind | rows | measured / predicted |\n| --- | ---: | ---: |")
    for kind, (low, high, count) in bands.items():
        print(f"| {', '.join(kind)} | {count} | {math.exp(low):.2f} to {math.exp(high):.2f} |")
    mean, low, high = _by_halves(rows)
    print(
        f"\nbands of one half hold {mean:.1%} of the other half ({low:.0%} to {high:.0%} of {_SPLITS} splits)"
    )
    mean, middle = _by_source(rows)
    print(f"bands without a source hold {mean:.1%} of its rows, {middle:.0%} in the median of sources")
    if options.out is not None:
        options.out.write_text(_toml(seen, bands), "utf-8")


if __name__ == "__main__":
    main()
