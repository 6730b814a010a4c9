"""Compares entries of the zoo under every sharding with one device, by `shoal.testing.check`.

Nouns: Case (an entry, a sharding, a precision). `outcomes` runs Cases on the ranks of a RankPool, `expected`
    gives the error by which a Case must be refused, `table` prints them. The tests and the docs call these.

There are three optimizer steps, each of two micro-batches a rank, evaluation after each, and a save and a
resume before the third. Dropout stays on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.errors import WorkerError
from shoal.models.task import Task
from shoal.spec.plan import Plan
from shoal.testing.check import Comparison, TaskTrial, Verdict
from shoal.testing.ranks import RankPool
from shoal.testing.zoo.vectors import BATCH

SHARDINGS: Mapping[str, Plan] = {
    "none": Plan(dp=2, microbatch=BATCH // 4),
    "zero1": Plan(dp=2, shard="zero1", microbatch=BATCH // 4),
    "zero2": Plan(dp=2, shard="zero2", microbatch=BATCH // 4),
    "zero3": Plan(dp=2, shard="zero3", microbatch=BATCH // 4),
    "hybrid": Plan(dp=4, replicate=2, shard="zero3", microbatch=BATCH // 8),
}
"""The Plans that every entry is trained under, without their precision."""

PRECISIONS = ("fp32", "bf16")

_REFUSED: Mapping[str, str] = {
    "recompute_reentrant": "the model recomputes with use_reentrant=True",
    "sparse_embedding": "the embedding embed has sparse=True",
}
"""Entries that are refused under every sharding, with the input that the error names."""

_SECONDS = 5.0  # seconds allowed per Case, and once more for the start; most take a tenth
_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One training to compare.

    Attributes:
        entry: Name of an entry of the zoo.
        sharding: One of `SHARDINGS`.
        precision: One of `PRECISIONS`.
    """

    entry: str
    sharding: str
    precision: str

    @property
    def plan(self) -> Plan:
        """Return the Plan that it is trained under."""
        return SHARDINGS[self.sharding].replace(precision=self.precision)

    def __str__(self) -> str:
        return f"{self.entry} under {self.sharding} in {self.precision}"


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


def expected(case: Case) -> str:
    """Return the beginning of the error by which a Case must be refused; "" if it must pass."""
    return _REFUSED.get(case.entry, "")


def table(
    cases: Iterable[Case], entries: Mapping[str, Callable[[], Task]]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table: entry by entry, what is special about it, and what is expected.

    Args:
        cases: The Cases.
        entries: The zoo, by name.
    """
    told = {case: f"refused: {expected(case)}" if expected(case) else "agrees" for case in cases}
    rows = []
    for name in dict.fromkeys(case.entry for case in told):
        special = next(iter((entries[name].__doc__ or "").splitlines()), "")
        rows.append([f"`{name}`", special, *(told[Case(name, each, PRECISIONS[0])] for each in SHARDINGS)])
    return ["model", "what is special", *(f"`{sharding}`" for sharding in SHARDINGS)], rows


def outcomes(
    pool: RankPool, cases: Sequence[Case], entries: Mapping[str, Callable[[], Task]]
) -> dict[Case, Verdict]:
    """Train all Cases, and return the verdict on each.

    Args:
        pool: The ranks.
        cases: The Cases to train.
        entries: The zoo, by name; functions that can be imported.

    Raises:
        MissingExtraError: An entry needs a package that is not installed.
    """
    found: dict[Case, Verdict] = {}
    for ranks in sorted({case.plan.ranks for case in cases}):
        work = [(case, entries[case.entry]) for case in cases if case.plan.ranks == ranks]
        found |= _on_ranks(pool, ranks, work)
    return {case: found[case] for case in cases}


def _on_ranks(
    pool: RankPool, ranks: int, work: Sequence[tuple[Case, Callable[[], Task]]]
) -> Iterator[tuple[Case, Verdict]]:
    """Yield the verdict on each Case. If one ends its ranks, each gets new ones."""
    try:
        first, *_ = pool.run(_served, ranks, work, timeout=_START_SECONDS + _SECONDS * len(work))
        yield from zip((case for case, _ in work), first, strict=True)
    except WorkerError as error:
        if len(work) > 1:
            for each in work:
                yield from _on_ranks(pool, ranks, [each])
        else:
            case = work[0][0]
            yield case, Verdict(str(case.plan), "broken", reason=error.reason.strip().splitlines()[-1])


def _served(work: Sequence[tuple[Case, Callable[[], Task]]]) -> list[Verdict | None]:
    """Return the verdict on each Case on the first rank."""
    verdicts = []
    for case, entry in work:
        model = f"{entry.__module__}:{entry.__qualname__}"
        trial = TaskTrial(model=model, batch=BATCH, dropout=True, buffers=True, resumed_before=2)
        verdicts.append(Comparison(trial, torch.device("cpu")).check(case.plan))
    return verdicts
