"""The step of this checkout beside that of another one, such as the commit before.

    git worktree add ../before COMMIT
    (cd ../before && PYTHON setup.py build_ext --inplace)
    python benchmarks/beside.py ../before [--rounds 7] [--steps 10] [--only "shoal none,shoal zero3"]

Each round runs `step.py` once from each checkout, every other round in the reverse order; its figure is the
median of its steps, and a ratio is taken in each round. Both use the packages of one environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

_HERE = Path(__file__).resolve().parent.parent
_CONTESTANTS = "shoal none,shoal train,shoal zero1,shoal zero2,shoal zero3"


def main() -> int:
    """Prints median and range of each contestant's ratio, of this checkout's step to the other's."""
    options = _options()
    names = options.only.split(",")
    steps: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds):
        order = [("this", _HERE), ("other", options.checkout.resolve())]
        for which, checkout in order if number % 2 else reversed(order):
            for name, seconds in _round(checkout, options.only, options.steps).items():
                steps.setdefault((name, which), []).append(seconds)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    print("| | step, ms | before, ms | ratio | range |\n| --- | ---: | ---: | ---: | --- |")
    for name in names:
        this, other = steps[name, "this"], steps[name, "other"]
        ratios = [one / two for one, two in zip(this, other, strict=True)]
        print(
            f"| {name} | {median(this) * 1e3:.1f} | {median(other) * 1e3:.1f} | {median(ratios):.3f} | "
            f"{min(ratios):.3f} to {max(ratios):.3f} |"
        )
    return 0


def _round(checkout: Path, only: str, steps: int) -> dict[str, float]:
    """Median seconds of a step of each contestant, by the checkout's own `step.py`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        command = [
            sys.executable,
            "benchmarks/step.py",
            "--rounds",
            "1",
            "--steps",
            str(steps),
            "--only",
            only,
        ]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run(
            [*command, "--json", str(file)],
            cwd=checkout,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=False,  # it exits with 1 where the reference did not run
        )
        content = json.loads(file.read_text(encoding="utf-8"))
    return {
        name: median(seconds for burst in bursts for seconds in burst["seconds"])
        for name, bursts in content["bursts"].items()
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="with the native core built in place")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--only", default=_CONTESTANTS, help="of the contestants of step.py")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
