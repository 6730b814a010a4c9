"""The collectives of this checkout beside those of another one, such as the commit before.

    git worktree add ../before COMMIT
    (cd ../before && PYTHON setup.py build_ext --inplace)
    python benchmarks/collectives_beside.py ../before [--ranks 2] [--collective all_reduce] [--fresh]

Each round runs `shoal bench` once from each checkout, every other round in the reverse order. Its figure is
the median of the bench's own rounds, and a ratio is taken in each round. Both use the packages of one
environment. `--fresh` needs a checkout that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from shoal.units import format_bytes

_HERE = Path(__file__).resolve().parent.parent
_SIZES = "1KiB,64KiB,1MiB,16MiB,128MiB"

Point = tuple[str, str, int, bool]
"""Collective, backend, bytes, and whether tensors were fresh."""


def main() -> int:
    """Prints median and range of each point's ratio, of this checkout's time to the other's."""
    options = _options()
    times: dict[Point, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        order = [("this", _HERE), ("other", options.checkout.resolve())]
        for which, checkout in order if number % 2 else reversed(order):
            for point, seconds in _round(checkout, options).items():
                times.setdefault(point, {"this": [], "other": []})[which].append(seconds)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    print("| | us | before, us | ratio | range |\n| --- | ---: | ---: | ---: | --- |")
    for (collective, backend, size, fresh), of in times.items():
        ratios = [one / two for one, two in zip(of["this"], of["other"], strict=True)]
        print(
            f"| {collective} of {format_bytes(size)}, {backend}{', fresh' * fresh} "
            f"| {median(of['this']) * 1e6:.4g} | {median(of['other']) * 1e6:.4g} "
            f"| {median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |"
        )
    return 0


def _round(checkout: Path, options: argparse.Namespace) -> dict[Point, float]:
    """Median seconds of each point, by the checkout's own bench."""
    command = [sys.executable, "-m", "shoal.cli.main", "bench", "--json", f"--ranks={options.ranks}"]
    command += [f"--collective={options.collective}", f"--backend={options.backend}"]
    command += [f"--sizes={options.sizes}", "--rounds=3", *(["--fresh"] if options.fresh else [])]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return {
        (row["collective"], row["backend"], row["bytes"], row.get("fresh", False)): row["median"]
        for row in json.loads(done.stdout)["rows"]
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="with the native core built in place")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=_SIZES, help=f"default {_SIZES}")
    parser.add_argument("--collective", default="all_reduce", help="default all_reduce")
    parser.add_argument("--backend", default="shoal,shoal-shared", help="default shoal,shoal-shared")
    parser.add_argument("--fresh", action="store_true", help="new tensors too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
