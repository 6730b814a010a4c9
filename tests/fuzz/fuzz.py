"""Drives fuzz targets with atheris: `python tests/fuzz/fuzz.py --seconds 1800 [TARGET ...]`.

Each target runs in a process of its own, from the inputs that are kept in `corpus/`; what it finds goes to
`build/fuzz/TARGET`, and an input that fails is left there as `crash-*`. A line for each target then tells
executions, edges covered and inputs found. Exit codes: 0 nothing failed; 1 a target failed; 2 no atheris.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LARGEST = 16_384  # bytes of an input
MEMORY = 6 << 30  # bytes of address space of a target


def drive(target: str, options: list[str]) -> None:
    """Fuzz a target in this process; it ends the process."""
    import atheris

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # an input that needs more fails as MemoryError

    from fuzz_targets import survives

    with atheris.instrument_imports(include=["shoal"]):
        survives(target, b"")  # imports what it needs

    atheris.Setup([target, *options], lambda data: survives(target, data))
    atheris.Fuzz()


def fuzz(target: str, seconds: int) -> bool:
    """Fuzz a target in a process of its own; return whether nothing failed."""
    found = ROOT / "build" / "fuzz" / target
    found.mkdir(parents=True, exist_ok=True)
    dictionary = HERE / "corpus" / f"{target}.dict"
    options = [str(found), str(HERE / "corpus" / target), f"-max_total_time={seconds}"]
    options += [f"-max_len={LARGEST}", "-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]
    options += [f"-artifact_prefix={found}/"] + [f"-dict={dictionary}"] * dictionary.is_file()
    path = found.parent / f"{target}.log"
    with path.open("w") as file:
        words = [sys.executable, __file__, "--drive", target, *options]
        ended = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, cwd=HERE)
    log = path.read_text(errors="replace")
    runs = re.search(r"number_of_executed_units: (\d+)", log)
    covered = re.findall(r"cov: (\d+).* corp: (\d+)", log)
    edges, inputs = covered[-1] if covered else ("?", "?")
    outcome = "nothing failed" if ended.returncode == 0 else f"FAILED: see {path}"
    figures = f"{runs[1] if runs else '?':>9} executions  {edges:>6} edges  {inputs:>5} inputs"
    print(f"{target:<14} {figures}  {outcome}", flush=True)
    return ended.returncode == 0


def main() -> int:
    """Fuzz the targets that were named, or all."""
    if sys.argv[1:2] == ["--drive"]:
        drive(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=1800, help="for each target (default: 1800)")
    args = parser.parse_args()
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("fuzzing needs atheris, which is not installed: run pip install 'shoal[fuzz]'", file=sys.stderr)
        return 2
    from fuzz_targets import TARGETS

    unknown = [target for target in args.targets if target not in TARGETS]
    if unknown:
        print(f"there is no target {unknown[0]!r}; the targets are {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    outcomes = [fuzz(target, args.seconds) for target in args.targets or TARGETS]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
