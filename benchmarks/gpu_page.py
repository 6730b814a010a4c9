"""The page of the acceptance run, from its lines: what was run when and where, the worst finding first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpu_outcome import NOT_BEGUN, OUTCOMES, Line, newest

__all__ = ["NOT_YET", "page", "status"]

NOT_YET = "Not run on a GPU yet: none was at hand."
_FENCE = "```"
_MARKUP = re.compile(r"([\\`*_<>|~\[\]])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def status(lines: Sequence[Line]) -> str:
    """What was run when, on which machine, at which commit, and how many rows had which outcome."""
    ran = [line for line in lines if line.outcome not in NOT_BEGUN]
    if not ran:
        return NOT_YET
    last = _last(ran)
    counts = {outcome: sum(line.outcome == outcome for line in lines) for outcome in OUTCOMES}
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in reversed(OUTCOMES) if counts[outcome])
    text = f"Run on {last.date[:10]} on {_where(last)}. {_count(len(lines), 'row')}: {told}."
    if others := [line for line in ran if _where(line) != _where(last)]:
        text += f" Of these {_count(len(others), 'row is', 'rows are')} of another commit or machine: "
        text += f"{'; '.join(sorted({_where(line) for line in others}))}."
    return text


def page(lines: Sequence[Line]) -> str:
    """Return the page: what was run, what did not go well, and each section."""
    lines = newest(lines)
    ran = [line for line in lines if line.outcome not in NOT_BEGUN]
    parts = [
        "# One GPU",
        status(lines),
        "`make gpu` writes this page from the lines of `gpu.jsonl`; `gpu.py` says how, and `gpu_rows.py` "
        "lists the rows. Each row is a process of its own.",
    ]
    if not ran:
        parts.append(
            "What is known of an earlier commit (6e03e49) on one H100 SXM with torch 2.11 is in "
            "`data/steps_one_h100.csv`: 29 steps, eager and with compiled blocks, to which the cost model is "
            "held ([how far predictions are](../docs/guides/validate.md#how-far-predictions-are))."
        )
    if bad := [line for line in lines if line.outcome != "right"]:
        parts.append(_findings(bad))
    main = _where(_last(ran)) if ran else ""
    for subject in dict.fromkeys(line.subject for line in lines):
        parts.append(_section(subject, [line for line in lines if line.subject == subject], main))
    return "\n\n".join(parts) + "\n"


def _last(ran: Sequence[Line]) -> Line:
    return max(ran, key=lambda line: line.date)


def _where(line: Line) -> str:
    return f"{line.machine or 'an unknown machine'}, at commit {line.commit}"


def _findings(bad: Sequence[Line]) -> str:
    """The rows that did not go well, the worst first, and the ends of their logs."""
    order = list(OUTCOMES)
    bad = sorted(bad, key=lambda line: (order.index(line.outcome), line.number))
    parts = ["## What did not go well, the worst first", "| outcome | row | why |\n| --- | --- | --- |"]
    parts[-1] += "".join(f"\n| {line.outcome} | {_cell(line.name)} | {_cell(line.reason)} |" for line in bad)
    meanings = (f"*{name}*: {OUTCOMES[name]}" for name in dict.fromkeys(line.outcome for line in bad))
    parts.append(f"{'; '.join(meanings)}.")
    for line in bad:
        if line.log:
            text = "\n".join(_CONTROL.sub("?", each).replace(_FENCE, "'''") for each in line.log)
            parts.append(f"The end of what {_cell(line.name)} printed:\n\n{_FENCE}\n{text}\n{_FENCE}")
    return "\n\n".join(parts)


def _section(subject: str, lines: Sequence[Line], main: str) -> str:
    """A table of a section's rows, and one of their figures where they have the same ones."""
    rows = ["| # | row | outcome | s | of | found |", "| ---: | --- | --- | ---: | ---: | --- |"]
    table = _figures(lines)
    for line in lines:
        found = "; ".join(text for text, figures in line.findings if not (table and figures))
        has_run = line.outcome not in NOT_BEGUN
        if has_run and _where(line) != main:
            found = "; ".join(filter(None, (found, f"on {_where(line)}")))
        cells = [_cell(line.name), line.outcome, f"{line.seconds:.0f}" if has_run else "", f"{line.budget:g}"]
        rows.append(f"| {line.number} | {' | '.join(cells)} | {_cell(found)} |")
    text = f"## {_cell(subject)}\n\n" + "\n".join(rows)
    return f"{text}\n\n{table}" if table else text


def _figures(lines: Sequence[Line]) -> str:
    """A table of figures, if at least two findings have one of the same name."""
    found = [(line.name, *finding) for line in lines for finding in line.findings if finding[1]]
    names = list(dict.fromkeys(name for *_, figures in found for name in figures))
    if not any(sum(name in figures for *_, figures in found) > 1 for name in names):
        return ""
    rows = [f"| row | | {' | '.join(map(_cell, names))} |", f"| --- | --- |{' ---: |' * len(names)}"]
    for row, text, figures in found:
        cells = [_number(figures[name]) if name in figures else "" for name in names]
        rows.append(f"| {_cell(row)} | {_cell(text.partition(': ')[0])} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(text: str) -> str:
    """Return a text as it looks in a table: without markup, control characters and ends of lines."""
    return _MARKUP.sub(r"\\\1", _CONTROL.sub("?", " ".join(text.split())))


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"
