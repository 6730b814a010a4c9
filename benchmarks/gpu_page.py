"""The page of the acceptance run, from its lines: what was run when and where, the worst finding first."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_outcome import OUTCOMES, Line, newest

__all__ = ["NOT_YET", "page", "status"]

NOT_YET = "Not run on a GPU yet: none was at hand."
_FENCE = "```"


def status(lines: Sequence[Line]) -> str:
    """What was run when, on which machine, at which commit, and how many rows had which outcome."""
    if not lines:
        return NOT_YET
    ran = [line for line in lines if line.outcome != "not run"] or list(lines)
    last = max(ran, key=lambda line: line.date)
    others = sorted({line.commit for line in ran} - {last.commit})
    counts = {outcome: sum(line.outcome == outcome for line in lines) for outcome in OUTCOMES}
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in reversed(OUTCOMES) if counts[outcome])
    text = f"Run on {last.date[:10]} on {last.machine or 'an unknown machine'}, at commit {last.commit}. "
    text += f"{_count(len(lines), 'row')}: {told}."
    if others:
        text += f" Some rows are older, from {'; '.join(others)}."
    return text


def page(lines: Sequence[Line]) -> str:
    """Return the page: what was run, what did not go well, and each section."""
    lines = newest(lines)
    parts = [
        "# One GPU",
        status(lines),
        "`make gpu` writes this page; [`gpu.py`](gpu.py) says how, [`gpu_rows.py`](gpu_rows.py) lists the "
        "rows. Each row is a process of its own; the lines of this page are in `data/gpu.jsonl`.",
    ]
    if not lines:
        parts.append(
            "What is known of an earlier commit (6e03e49) on one H100 SXM with torch 2.11 is in "
            "`data/steps_one_h100.csv`: 29 steps, eager and with compiled blocks, to which the cost model is "
            "held ([how far predictions are](../docs/guides/validate.md#how-far-predictions-are))."
        )
    if bad := [line for line in lines if line.outcome != "right"]:
        parts.append(_findings(bad))
    for subject in dict.fromkeys(line.subject for line in lines):
        parts.append(_section(subject, [line for line in lines if line.subject == subject]))
    return "\n\n".join(parts) + "\n"


def _findings(bad: Sequence[Line]) -> str:
    """The rows that did not go well, the worst first, and the ends of their logs."""
    order = list(OUTCOMES)
    bad = sorted(bad, key=lambda line: (order.index(line.outcome), line.number))
    parts = ["## What did not go well, the worst first", "| outcome | row | why |\n| --- | --- | --- |"]
    parts[-1] += "".join(f"\n| {line.outcome} | {line.name} | {_cell(line.reason)} |" for line in bad)
    seen = ", ".join(dict.fromkeys(line.outcome for line in bad))
    meanings = "; ".join(f"*{name}*: {OUTCOMES[name]}" for name in seen.split(", "))
    parts.append(f"{meanings}.")
    for line in bad:
        if line.log:
            text = "\n".join(each.replace(_FENCE, "'''") for each in line.log)
            parts.append(f"The end of what {line.name} printed:\n\n{_FENCE}\n{text}\n{_FENCE}")
    return "\n\n".join(parts)


def _section(subject: str, lines: Sequence[Line]) -> str:
    """A table of a section's rows, and one of their figures where they have the same ones."""
    rows = ["| # | row | outcome | s | of | found |", "| ---: | --- | --- | ---: | ---: | --- |"]
    table = _figures(lines)
    for line in lines:
        found = "; ".join(text for text, figures in line.findings if not (table and figures))
        seconds = "" if line.outcome in ("not run", "lacking") else f"{line.seconds:.0f}"
        rows.append(
            f"| {line.number} | {line.name} | {line.outcome} | {seconds} | {line.budget:g} | {_cell(found)} |"
        )
    text = f"## {subject}\n\n" + "\n".join(rows)
    return f"{text}\n\n{table}" if table else text


def _figures(lines: Sequence[Line]) -> str:
    """A table of figures, if at least two findings have one of the same name."""
    found = [(text, figures) for line in lines for text, figures in line.findings if figures]
    names = list(dict.fromkeys(name for _, figures in found for name in figures))
    if len(found) < 2 or not any(sum(name in figures for _, figures in found) > 1 for name in names):
        return ""
    rows = [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for text, figures in found:
        cells = [_number(figures[name]) if name in figures else "" for name in names]
        rows.append(f"| {_cell(text.partition(': ')[0])} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
