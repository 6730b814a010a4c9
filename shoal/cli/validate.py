"""Predicts every row of a table of measurements, and prints prediction, measurement and error of each row.
For each family of rows, and for all, it prints the median, mean and 90th percentile of the absolute
errors, and the bias: the mean of the errors with their signs. The columns tell whether rows are training
steps, layers, collectives or single operations; docs/guides/validate.md lists them.

Exit codes: 0 predicted, however large the errors; 2 the table cannot be read, or some rows cannot be
predicted: stderr lists these after the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shoal.cli.table import as_json, table_of
from shoal.errors import UserError
from shoal.predict.validate import Accuracy, Comparison, accuracy_of, validate
from shoal.predict.validate.collectives import over_all_collectives
from shoal.spec.cluster import Cluster
from shoal.units import format_bytes, format_seconds

_FEW = 20  # rows that are printed by default

_HALVES = {"fitted": (True,), "held out": (False,), "all": (True, False)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("table", metavar="TABLE.csv", help="the measurements")
    parser.add_argument(
        "--rows", action="store_true", help=f"print the rows, even if there are more than {_FEW}"
    )
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="print errors separately for rows that constants may be fitted to, and for the rest",
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="predict all steps of the table for these machines (default: those that its rows name)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        DataError: The table cannot be read, or lacks a column.
        UserError: The error of the first row, if no row can be predicted.
    """
    refused: list[UserError] = []
    cluster = None if args.cluster is None else Cluster.parse(args.cluster)
    comparisons = validate(args.table, refused.append, cluster)
    if refused and not comparisons:
        raise refused[0]
    if args.json:
        print(as_json(_summary(comparisons, refused)))
    else:
        halves = ("fitted", "held out") if args.held_out else ("all",)
        parts = [_rows(comparisons)] if args.rows or len(comparisons) <= _FEW else []
        print("\n\n".join([*parts, _errors(comparisons, halves)]))
    if not refused:
        return 0
    rows = len(refused) + len({each.line for each in comparisons})
    print(f"shoal: {len(refused)} of {rows} rows cannot be predicted", file=sys.stderr)
    for error in refused[:_FEW]:
        print(f"shoal: {error}", file=sys.stderr)
    if len(refused) > _FEW:
        print(f"shoal: and {len(refused) - _FEW} more, which --json lists", file=sys.stderr)
    return UserError.exit_code


def _rows(comparisons: Sequence[Comparison]) -> str:
    rows = [
        [
            f"{each.line}",
            each.family,
            each.name,
            each.quantity,
            _format(each.predicted, each.quantity),
            _format(each.measured, each.quantity),
            f"{each.error:+.1%}",
            each.plan,
        ]
        for each in comparisons
    ]
    return table_of(["line", "family", "row", "what", "predicted", "measured", "error", "plan"], rows)


def _format(value: float, quantity: str) -> str:
    return format_bytes(round(value)) if quantity == "memory" else format_seconds(value)


def _errors(comparisons: Sequence[Comparison], halves: Sequence[str]) -> str:
    told = []
    for half in halves:
        rows_of_half = "rows" if half == "all" else f"{half}: rows"
        told += [rows_of_half, "median", "mean", "90 % below", "bias"]
    rows = []
    for quantity, family, members in _groups(comparisons):
        cells = [f"{quantity}, {family or 'all'}"]
        for half in halves:
            cells += _cells(accuracy_of(each for each in members if each.fitted in _HALVES[half]))
        rows.append(cells)
    return table_of(["error of", *told], rows)


def _cells(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return ["0", "-", "-", "-", "-"]
    return [
        f"{accuracy.rows}",
        f"{accuracy.median:.1%}",
        f"{accuracy.mean:.1%}",
        f"{accuracy.ninth_decile:.1%}",
        f"{accuracy.bias:+.1%}",
    ]


def _groups(comparisons: Sequence[Comparison]) -> list[tuple[str, str | None, list[Comparison]]]:
    """Return, by quantity, every family's comparisons, and then all of them as family None.

    Different collectives are quantities of their own, and another one together.
    """
    groups: list[tuple[str, str | None, list[Comparison]]] = []
    by_quantity: dict[str, list[Comparison]] = {}
    for each in comparisons:
        by_quantity.setdefault(each.quantity, []).append(each)
    for quantity, members in (by_quantity | over_all_collectives(comparisons)).items():
        families = list(dict.fromkeys(each.family for each in members))
        if len(families) > 1:
            groups += [
                (quantity, name, [each for each in members if each.family == name]) for name in families
            ]
        groups.append((quantity, None, members))
    return groups


def _summary(comparisons: Sequence[Comparison], refused: Sequence[UserError]) -> dict[str, Any]:
    """Return the rows, the errors of each group by half, and why rows are not predicted."""
    return {
        "rows": [{**asdict(each), "error": each.error} for each in comparisons],
        "errors": [
            {"quantity": quantity, "family": family, "half": half, **asdict(found)}
            for quantity, family, members in _groups(comparisons)
            for half, fitted in _HALVES.items()
            if (found := accuracy_of(each for each in members if each.fitted in fitted)) is not None
        ],
        "refused": [
            {"given": each.given, "possible": each.possible, "change": each.change} for each in refused
        ],
    }
