"""Breakdowns, verdicts and predictions of a step: as objects for JSON, and as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.cli.table import table_of
from shoal.spec.timeline import Breakdown, CollectiveFigures, Parts, Purpose
from shoal.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shoal.analyze.diagnosis import Verdict

_LARGE_LAUNCH = 0.1
"""Share of a step from which on the report says what to do about launch."""


def breakdown_summary(breakdown: Breakdown, rank: int | None) -> dict[str, Any]:
    """Return an object for JSON: seconds of the parts, for one rank or for all, and the collectives."""
    if rank is None:
        shown, parts, collectives = breakdown.ranks, breakdown.parts, breakdown.collectives
    else:
        of_rank = breakdown.of(rank)
        shown, parts, collectives = (of_rank,), of_rank.parts, of_rank.collectives
    return {
        **_parts(parts),
        "ranks": {
            str(each.rank): {"steps": len(each.steps), "counted": len(each.counted), **_parts(each.parts)}
            for each in shown
        },
        "collectives": {operation: _collective(figures) for operation, figures in collectives.items()},
    }


def _parts(parts: Parts) -> dict[str, Any]:
    disjoint = parts.disjoint()
    others = asdict(parts).keys() - disjoint.keys() - {"launch"}
    return {"parts": disjoint, **{name: value for name, value in asdict(parts).items() if name in others}}


def _collective(figures: CollectiveFigures) -> dict[str, Any]:
    return {**asdict(figures), "algbw": figures.algbw}


def parts_text(breakdown: Mapping[str, Any]) -> str:
    """Return the table of where a step's time went."""
    wall = breakdown["wall"]
    rows = [
        [words(name), f"{seconds:.6f}", f"{seconds / wall:.1%}"]
        for name, seconds in [*breakdown["parts"].items(), ("step", wall)]
    ]
    table = table_of(["where a step's time went", "seconds", "share"], rows)
    communication = breakdown["communication"]
    if communication == 0:
        return table
    overlapped = breakdown["overlapped_communication"] / communication
    moved = format_bytes(round(breakdown["bytes"]))
    return f"{table}\n\n" + (
        f"communication: {format_seconds(communication)} a step, {overlapped:.1%} of it overlapped; "
        f"{moved} a step and rank"
    )


def launch_text(breakdown: Mapping[str, Any], plan: str) -> str:
    """Return what to do about launch; "" if it is small, or if the host itself computes."""
    share = breakdown["parts"].get("launch", 0.0) / breakdown["wall"]
    if share < _LARGE_LAUNCH:
        return ""
    compiled = "" if "compile=blocks" in plan else "Set compile=blocks in the Plan: fewer launches. "
    return (
        f"launch: the device idles for {share:.0%} of a step, because the host gives it work too slowly.\n"
        f"{compiled}Set a larger microbatch: more work for each launch."
    )


def ranks_text(ranks: Mapping[str, Any]) -> str:
    """Return the table of the shares of the parts, rank by rank."""
    names = list(dict.fromkeys(name for each in ranks.values() for name in each["parts"]))
    rows = [
        [rank, f"{each['wall']:.6f}", *(f"{each['parts'].get(name, 0) / each['wall']:.1%}" for name in names)]
        for rank, each in ranks.items()
    ]
    return table_of(["rank", "step seconds", *map(words, names)], rows)


def collectives_text(collectives: Mapping[str, Any]) -> str:
    """Return the table of each collective's figures."""
    rows = [
        [
            operation or "(unnamed)",
            f"{each['count']:.4g}",
            format_bytes(round(each["bytes"])),
            f"{each['seconds']:.6f}",
            f"{each['exposed_seconds']:.6f}",
            f"{each['algbw'] / 1e9:.3g} GB/s" if each["algbw"] is not None else "-",
        ]
        for operation, each in collectives.items()
    ]
    return table_of(["collectives a step and rank", "count", "bytes", "seconds", "exposed", "algbw"], rows)


def named_collectives_text(collectives: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each collective of a step."""
    rows = [
        [
            each["name"],
            f"{each['count']:.4g}",
            format_bytes(round(each["bytes"])),
            "+".join(each["algorithms"]) or "-",
            f"{each['seconds']:.6f}",
            f"{each['seconds'] - each['exposed_seconds']:.6f}",
            f"{each['exposed_seconds']:.6f}",
        ]
        for each in collectives
    ]
    names = ["each collective of a step", "count", "bytes", "algorithm", "seconds", "overlapped", "exposed"]
    return table_of(names, rows)


def compare_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the result of `kinds_compared` as a table."""
    return table_of(
        ["predicted beside measured", "predicted", "measured", "error"],
        [
            [
                f"  {row['kind']}" if row["kind"] in tuple(Purpose) else words(row["kind"]),
                f"{row['predicted']:.6f}",
                f"{row['measured']:.6f}",
                "-" if row["error"] is None else f"{row['error']:+.1%}",
            ]
            for row in rows
        ],
    )


def verdict_summary(verdict: Verdict) -> dict[str, Any]:
    """Return an object for JSON; `sentences` has the verdict in words."""
    return {**asdict(verdict), "sentences": list(verdict.sentences())}


def words(name: str) -> str:
    """Return the readable name of a part."""
    return name.replace("_", " ")
