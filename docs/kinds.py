"""The table of docs/reference/models-under-plans.md: what becomes of each kind of model under each Plan.

`python docs/kinds.py LINES` takes the lines that the long test wrote, one for each cell, and writes
docs/kinds.jsonl, one for each kind; `python docs/generate.py` makes the page of these.
"""

from __future__ import annotations

import collections
import json
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

__all__ = ["condensed", "counted", "kind_rows", "reason_rows"]

FILE = Path(__file__).parent / "kinds.jsonl"
_COLUMNS = (
    *("dp", "zero3", "tp plain", "tp sequence", "pp", "cp ring", "cp ulysses", "boundaries"),
    *("balance dp", "balance tp", "balance cp", "balance pp"),
)
_CLASS = re.compile(r"^[A-Z]\w+ (?=cannot|has|was)|\b[A-Z]\w*(?:For[A-Z]\w+|LMHead\w*|Model|Attention)\b")
_LAYER = re.compile(r"\b(?:\w+\.)+\d+\.")


def condensed(lines: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return one row for each kind: its verdict in each cell, with the words of what is not equal."""
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        row = rows.setdefault(line["kind"], {"kind": line["kind"]})
        row[line["cell"]] = _outcome(line["verdict"], line.get("words", ""))
    ordered = ("kind", *_COLUMNS)
    return [{name: rows[kind][name] for name in ordered if name in rows[kind]} for kind in sorted(rows)]


def kind_rows() -> tuple[list[str], list[list[str]]]:
    """Return the kinds whose outcomes are the same, with a number for each reason."""
    numbers = {reason: number for number, reason in enumerate(_reasons(), 1)}
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in _rows():
        cells = tuple(_numbered(row.get(column, "not run"), numbers) for column in _COLUMNS)
        groups.setdefault(cells, []).append(f"`{row['kind']}`")
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    return ["kinds", *_COLUMNS], [[", ".join(names), *cells] for cells, names in ordered]


def counted() -> str:
    """Return how many cells have which verdict."""
    verdicts = collections.Counter(
        outcome.partition(":")[0] for row in _rows() for name, outcome in row.items() if name in _COLUMNS
    )
    told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common() if verdict != "none")
    (release,) = (row["transformers"] for row in _lines() if "transformers" in row)
    return f"transformers {release}, {len(_rows())} kinds: {told}."


def reason_rows() -> tuple[list[str], list[list[str]]]:
    """Return the reasons by number, in the words that are printed."""
    return ["", "what is printed"], [[str(number), text] for number, text in enumerate(_reasons(), 1)]


def _rows() -> list[dict[str, str]]:
    return [line for line in _lines() if "kind" in line]


def _lines() -> list[dict[str, str]]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def _reasons() -> list[str]:
    found = {outcome.partition(": ")[2] for row in _rows() for outcome in row.values() if ": " in outcome}
    return sorted(found)


def _numbered(outcome: str, numbers: Mapping[str, int]) -> str:
    verdict, _, reason = outcome.partition(": ")
    if verdict == "none":
        return "-"
    return f"{verdict} {numbers[reason]}" if reason else verdict


def _outcome(verdict: str, words: str) -> str:
    """Return the verdict, and the first sentence of its words, without the names of one model's parts."""
    if not words:
        return verdict
    if verdict == "crash" or words.startswith("crash"):
        sentence = words.strip().splitlines()[-1]
    else:
        sentence = words.strip().splitlines()[0]
    if verdict == "wrong":
        sentence = re.sub(r"^step \d+: | departs by .*| of [\w.]+(?= departs)", "", sentence)
    sentence = _LAYER.sub("", _CLASS.sub("the model ", sentence)).replace("the model  ", "the model ")
    return f"{verdict}: {' '.join(sentence.split())}"


if __name__ == "__main__":
    given = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    rows = [{"transformers": version("transformers")}, *condensed(json.loads(line) for line in given)]
    FILE.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
