"""The time of one optimizer step on CPU ranks: Shoal, torch, Accelerate, Lightning Fabric and DeepSpeed.

    python benchmarks/step.py [--ranks 2] [--rounds 5] [--steps 5] [--only NAME,...] [--markdown]

The same model, batches, AdamW and clipping for all (`contestants.py`), in interleaved rounds (`rounds.py`). A
round's figure is the median of its steps; the table has the median over rounds and their range. A ratio is
taken in each round, to the peer that does the same by torch's own means. Exits with 1 if a contestant's
losses are not those of torch DDP: then it did other work, and its time means nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from contestants import CONTESTANTS, REFERENCE, Contestant, Task
from rounds import Burst, Ranks, Spread, interleave

from shoal.errors import WorkerError
from shoal.machine.bench import describe
from shoal.units import format_bytes

_WARM_UP = 3  # steps
_DIFFER = "DIFFER"
_LOSS_TOLERANCE = 1e-3  # relative: the order of sums differs, and steps multiply what that makes


@dataclass(frozen=True, slots=True)
class Row:
    """What the table has of a contestant.

    Attributes:
        name: Of the contestant.
        seconds: Of a step, over rounds.
        peer: What it is compared with, if that ran.
        ratio: To the peer's step, over rounds.
        peak_bytes: Largest resident memory of a rank.
        losses: Of the first step and the last, means over ranks.
        agreement: Whether these are the reference's: agree, DIFFER, or unchecked where that did not run.
    """

    name: str
    seconds: Spread
    peer: str | None
    ratio: Spread | None
    peak_bytes: int
    losses: tuple[float, float]
    agreement: str


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    machine = describe()
    chosen = [contestant for contestant in CONTESTANTS if contestant.name in options.only]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        task = Task(options.preset, options.sequence, options.microbatch, options.ranks, Path(folder))
        task.samples()  # tokenizes, once for all
        running, warm_ups, left_out = _start(chosen, task, stack)
        bursts = interleave(running, options.rounds, options.steps, _say)
    rows = [_row(contestant, warm_ups, bursts) for contestant in chosen if contestant.name in bursts]
    print(_render(rows, markdown=options.markdown))
    print(f"\n{_caption(options)}\n{machine}")
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    if options.json is not None:
        content = {
            "machine": dataclasses.asdict(machine),
            "options": {name: value for name, value in vars(options).items() if name != "json"},
            "rows": [dataclasses.asdict(row) for row in rows],
            "bursts": {
                name: [dataclasses.asdict(burst) for burst in turns] for name, turns in bursts.items()
            },
            "left_out": left_out,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.agreement == _DIFFER for row in rows) else 0


def _start(
    contestants: Sequence[Contestant], task: Task, stack: ExitStack
) -> tuple[dict[str, Ranks], dict[str, Burst], dict[str, str]]:
    """Starts and warms up one contestant after the other.

    Returns:
        Who runs; their warm-ups; who is left out, and why.
    """
    running: dict[str, Ranks] = {}
    warm_ups: dict[str, Burst] = {}
    left_out: dict[str, str] = {}
    for contestant in contestants:
        needed = task.ranks * max((burst.peak_bytes for burst in warm_ups.values()), default=0)
        if contestant.package is not None and find_spec(contestant.package) is None:
            left_out[contestant.name] = "not installed: pip install -r benchmarks/requirements.txt"
        elif _available_memory() < needed:
            left_out[contestant.name] = (
                f"{format_bytes(_available_memory())} of memory are free, and the largest so far took "
                f"{format_bytes(needed)}; run fewer with --only"
            )
        else:
            _say(f"starting {contestant.name}")
            ranks = Ranks(partial(contestant.build, task), task.ranks)
            stack.callback(ranks.close)
            try:
                warm_ups[contestant.name] = ranks.run(_WARM_UP)
                running[contestant.name] = ranks
            except WorkerError as error:
                _say(error.detail)
                left_out[contestant.name] = str(error)
    return running, warm_ups, left_out


def _row(contestant: Contestant, warm_ups: Mapping[str, Burst], bursts: Mapping[str, Sequence[Burst]]) -> Row:
    def by_round(name: str) -> list[float]:
        return [median(burst.seconds) for burst in bursts[name]]

    def losses(name: str) -> tuple[float, float]:
        return warm_ups[name].losses[0], bursts[name][-1].losses[-1]

    name, peer = contestant.name, contestant.peer if contestant.peer in bursts else None
    ratio = None
    if peer is not None:
        rounds = zip(by_round(name), by_round(peer), strict=True)
        ratio = Spread.of([own / other for own, other in rounds])
    return Row(
        name=name,
        seconds=Spread.of(by_round(name)),
        peer=peer,
        ratio=ratio,
        peak_bytes=bursts[name][-1].peak_bytes,
        losses=losses(name),
        agreement=_agreement(losses(name), losses(REFERENCE), contestant)
        if REFERENCE in bursts
        else "unchecked",
    )


def _agreement(losses: tuple[float, float], wanted: tuple[float, float], contestant: Contestant) -> str:
    first, last = (
        abs(own - other) <= _LOSS_TOLERANCE * other for own, other in zip(losses, wanted, strict=True)
    )
    if not contestant.communicates:  # each rank trains on its own part, so that later steps have to differ
        return "first agrees" if first else _DIFFER
    return "agree" if first and last else _DIFFER


def _render(rows: Sequence[Row], *, markdown: bool) -> str:
    header = ["", "step, ms", "range", "ratio", "range", "to", "peak RSS, MiB", "losses"]
    body = [
        [
            row.name,
            f"{row.seconds.median * 1e3:.1f}",
            f"{row.seconds.low * 1e3:.1f} to {row.seconds.high * 1e3:.1f}",
            f"{row.ratio.median:.3f}" if row.ratio else "",
            f"{row.ratio.low:.3f} to {row.ratio.high:.3f}" if row.ratio else "",
            row.peer or "",
            f"{row.peak_bytes / (1 << 20):.0f}",
            row.agreement,
        ]
        for row in rows
    ]
    rule = ["---" if column in (0, 5, 7) else "---:" for column in range(len(header))]
    table = [header, rule, *body] if markdown else [header, *body]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table]
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _caption(options: argparse.Namespace) -> str:
    return (
        f"{options.ranks} ranks of one thread, model {options.preset}, {options.microbatch} x "
        f"{options.sequence} tokens a rank and step; medians and ranges of {options.rounds} rounds of "
        f"{options.steps} steps"
    )


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [contestant.name for contestant in CONTESTANTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=_positive, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--rounds", type=_positive, default=5, help="default 5")
    parser.add_argument(
        "--steps", type=_positive, default=5, help="of each contestant in a round (default 5)"
    )
    parser.add_argument("--preset", default="12m", help="of shoal.models (default 12m)")
    parser.add_argument("--sequence", type=_positive, default=256, help="tokens (default 256)")
    parser.add_argument(
        "--microbatch", type=_positive, default=1, help="sequences a rank and step (default 1)"
    )
    parser.add_argument("--only", metavar="NAME,...", default=names, help=f"of: {', '.join(names)}")
    parser.add_argument("--markdown", action="store_true", help="prints the table as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every step's time and loss too")
    options = parser.parse_args(arguments)
    if isinstance(options.only, str):
        options.only = [name.strip() for name in options.only.split(",")]
    unknown = set(options.only) - set(names)
    if unknown:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
