"""How fast Plans are chosen: `python benchmarks/planner.py`, or `--commands` for the whole of `shoal plan`.

Searches: for each case the legal Plans, those that had to be timed, the processor seconds of one core for the
five best degrees and for the best alone, legal Plans a second, and Plans a second where each one is timed and
its memory looked at in full, with nothing decided by a bound. As in `shoal plan` nothing looks for garbage.

Commands: the seconds of `shoal plan --json` from start to end, and the processor seconds of its processes: on
cores that are free there are two. `--beside CHECKOUT` takes turns with the command of another checkout, such
as the commit before, and says whether both print the same bytes.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.cli.table import table_of
from shoal.predict.planner import Search
from shoal.predict.planner.search_cache import Shared
from shoal.spec.cluster import Cluster
from shoal.spec.workload import ModelShape, Workload, shape, workload_of

CASES = {
    "125m on 8 A100": ("125m", "dgx-a100:8", 64),
    "llama3-8b on 64 H100": ("llama3-8b", "dgx-h100:64", 256),
    "llama3-70b on 256 H100": ("llama3-70b", "dgx-h100:256", 512),
    "mixtral-8x7b on 128 H100": ("mixtral-8x7b", "dgx-h100:128", 512),
    "a trillion parameters on 4,096 H100": ("trillion", "dgx-h100:4096", 3072),
}
COMMANDS = {
    "a trillion parameters on 4,096 devices": ("gpt3-1t", "dgx-h100:4096", 3072),
    "256 experts on 2,048 devices": ("deepseek-v3", "dgx-h100:2048", 2048),
    "8 billion parameters on 16,384 devices": ("llama3-8b", "dgx-h100:16384", 2048),
}
TRILLION = ModelShape(
    name="trillion",
    layers=128,
    hidden=25600,
    ffn=102400,
    heads=160,
    vocab=51200,
    seq=2048,
    gated=False,
    rotary=False,
    biases=True,
)
"""The largest row of Narayanan et al. 2021 (arXiv:2104.04473, table 1)."""

SAMPLE = 2000  # Plans that are looked at in full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--commands", action="store_true", help="measure whole commands, and not searches")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command (default 5)")
    parser.add_argument(
        "--beside", metavar="CHECKOUT", type=Path, help="also run another checkout's commands"
    )
    args = parser.parse_args()
    if args.commands:
        _commands(args.rounds, [Path(__file__).parents[1], *([args.beside] if args.beside else [])])
    else:
        _searches()


def _commands(rounds: int, checkouts: Sequence[Path]) -> None:
    """Print the seconds of whole commands, which checkouts run in turns."""
    rows = []
    for name, (model, machine, batch) in COMMANDS.items():
        asked = f"--model {model} --cluster {machine} --batch {batch}"
        runs = [[_run(each, asked) for each in checkouts] for _ in range(rounds)]
        for number, every in enumerate(zip(*runs, strict=True)):
            wall, processor, printed = zip(*every, strict=True)
            same = "yes" if set(printed) == {runs[0][0][2]} else "no"
            where = "before" if number else "here"
            rows.append(
                [name, where, _median(wall), _median(processor), *([same] if len(checkouts) > 1 else [])]
            )
        print(name, file=sys.stderr)
    head = ["command", "checkout", "seconds", "processor seconds"]
    print(table_of([*head, *(["equal"] if len(checkouts) > 1 else [])], rows))


def _run(checkout: Path, asked: str) -> tuple[float, float, bytes]:
    """Run a command; return its seconds, its processor seconds in user mode, and what it printed."""
    command = [sys.executable, "-m", "shoal", "plan", *asked.split(), "--json"]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, check=True, capture_output=True, env=environment, cwd=checkout)
    seconds = time.perf_counter() - begin
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, done.stdout


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def _searches() -> None:
    gc.disable()
    rows = []
    for name, (model, machine, batch) in CASES.items():
        workload = workload_of(TRILLION if model == "trillion" else shape(model))
        cluster = Cluster.parse(machine)
        five = _timed(workload, cluster, batch, 5)
        alone = _timed(workload, cluster, batch, 1)
        rows.append(
            [
                name,
                f"{five[1]:,}",
                f"{five[2]:,}",
                f"{five[0]:.2f} s",
                f"{alone[0]:.2f} s",
                f"{five[1] / five[0]:,.0f}",
                f"{_in_full(workload, cluster, batch):,.0f}",
            ]
        )
        print(name, file=sys.stderr)
    print(table_of(["case", "legal", "played", "five best", "best", "legal/s", "in full/s"], rows))


def _timed(workload: Workload, cluster: Cluster, batch: int, limit: int) -> tuple[float, int, int]:
    before = time.process_time()
    ranking = Search(workload, cluster, batch).best(limit)
    return time.process_time() - before, ranking.legal, ranking.played


def _in_full(workload: Workload, cluster: Cluster, batch: int) -> float:
    """Plans a second, each bounded, and its memory looked at."""
    shared = Shared(workload, cluster, batch)
    space = shared.space
    before, count = time.process_time(), 0
    every = (variant for degrees in space.degrees() for variant in space.variants(degrees))
    for variant in every:
        counts = shared.split(variant)
        for sharding in space.shardings(variant.degrees):
            plan = shared.plan(variant, sharding, counts)
            shared.costs.least(plan, batch)
            shared.memories.fullest(plan, batch)
            count += 1
        if count >= SAMPLE:
            break
    return count / (time.process_time() - before)


if __name__ == "__main__":
    main()
