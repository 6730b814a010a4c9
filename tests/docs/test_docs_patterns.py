"""Each row of docs/guides/patterns.md is run under each of its Plans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pattern_stand_ins import PROGRAMS, run

from shoal.spec.plan import Plan

PAGE = Path(__file__).parents[2] / "docs/guides/patterns.md"


class Row(NamedTuple):
    """A row of the page: `result` is "works", or the name of an error, whose text has `words`."""

    pattern: str
    plans: list[str]
    result: str
    words: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| pattern |", "| --- |")):
            pattern, plans, result = line.strip("| ").split(" | ")
            name, _, words = result.partition(": ")
            found.append(Row(pattern, re.findall(r"`([^`]*)`", plans), name.strip("`"), words))
    return found


def test_each_row_of_the_page_has_a_program_and_each_program_a_row() -> None:
    assert [row.pattern for row in rows()] == [row.pattern for row in rows() if row.pattern in PROGRAMS]
    assert PROGRAMS.keys() == {row.pattern for row in rows()}
    assert all(row.plans for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.pattern)
def test_what_becomes_of_a_pattern_is_what_the_page_says(ranks, row: Row) -> None:
    for package in ("transformers", "peft"):
        if package in row.pattern or package in PROGRAMS[row.pattern].__code__.co_names:
            pytest.importorskip(package)
    expected = run(row.pattern, "dp=1")
    for plan in row.plans:
        ended = ranks.run(run, Plan.parse(plan).ranks, row.pattern, plan)
        if row.result == "works":
            for result, value in (expected, *ended):
                assert result == "works", ended
                # fp32 sums in another order
                torch.testing.assert_close(value, expected[1], rtol=1e-4, atol=1e-5)
        else:  # a rank that waits for one with the error learns that this one is gone
            assert {result for result, _ in ended} <= {row.result, "CommunicationError"}, ended
            assert any(row.words in text for result, text in ended if result == row.result), ended
