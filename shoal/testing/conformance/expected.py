"""The required Outcome of every Case, and the table of outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shoal.models.task import Task
from shoal.testing.conformance.case import PRECISIONS, SHARDINGS, Case
from shoal.testing.conformance.outcome import Outcome

__all__ = ["all_cases", "expected", "sampled_cases", "table"]

_REFUSED: Mapping[str, str] = {
    "recompute_reentrant": "LayoutError: the model recomputes with use_reentrant=True",
    "sparse_embedding": "ModelError: the embedding embed has sparse=True",
}
"""Entries that are refused under every sharding, with the error and the input that it names."""


def all_cases(entries: Iterable[str]) -> list[Case]:
    """Return every entry under every sharding in every precision."""
    return [
        Case(entry, sharding, precision)
        for entry in entries
        for sharding in SHARDINGS
        for precision in PRECISIONS
    ]


def sampled_cases(entries: Iterable[str]) -> list[Case]:
    """Return every entry under zero3 and under one of the other shardings in turn: a fifth of `all_cases`.

    Each entry has both precisions, and each sharding has entries in both.
    """
    others = [sharding for sharding in SHARDINGS if sharding != "zero3"]
    first, second = PRECISIONS
    cases = []
    for row, entry in enumerate(entries):
        turn, column = divmod(row, len(others))
        precisions = (first, second) if (turn + column) % 2 == 0 else (second, first)
        cases += [Case(entry, "zero3", precisions[0]), Case(entry, others[column], precisions[1])]
    return cases


def expected(case: Case) -> Outcome:
    """Return the required Outcome of a Case."""
    words = _REFUSED.get(case.entry)
    return Outcome("agrees") if words is None else Outcome("refused", words)


def table(
    outcomes: Mapping[Case, Outcome], entries: Mapping[str, Callable[[], Task]]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table: entry by entry, what is special about it, and its outcomes.

    Args:
        outcomes: Outcomes of `all_cases` of some entries.
        entries: The zoo, by name.
    """
    rows = []
    for name in dict.fromkeys(case.entry for case in outcomes):
        special = next(iter((entries[name].__doc__ or "").splitlines()), "")
        cells = [
            _cell([outcomes[Case(name, sharding, each)] for each in PRECISIONS]) for sharding in SHARDINGS
        ]
        rows.append([f"`{name}`", special, *cells])
    return ["model", "what is special", *(f"`{sharding}`" for sharding in SHARDINGS)], rows


def _cell(by_precision: list[Outcome]) -> str:
    told = [
        outcome.kind if outcome.kind == "agrees" else f"{outcome.kind}: {outcome.text}"
        for outcome in by_precision
    ]
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"{precision} {text}" for precision, text in zip(PRECISIONS, told, strict=True))
