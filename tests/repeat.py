"""Passes the whole suite several times, and keeps a line of each: `make test-repeat TIMES=10 BUSY=4`.

Lines are appended to docs/reference/test-runs.jsonl, from which docs/generate.py makes the table of a page.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "docs" / "reference" / "test-runs.jsonl"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep processes at work that take a core each, as far as there are cores."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def line_of(output: str, code: int, seconds: float, processes: int) -> dict[str, Any]:
    """What is kept of a run of `make test`."""
    counts = {
        name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)\b", output)
    }
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": git("rev-parse", "--short=8", "HEAD") + ("+" if git("status", "--porcelain") else ""),
        "machine": f"{os.cpu_count()} cores, {round(memory / 2**30)} GiB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "busy": processes,
        "passed": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
        "failed": failed if failed or code == 0 else [f"make test ended with {code}"],
        "seconds": round(seconds),
    }


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Run; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="how often the suite is passed")
    parser.add_argument("--busy", type=int, default=0, help="processes that work beside it")
    arguments = parser.parse_args()
    is_green = True
    for number in range(arguments.times):
        began = time.monotonic()
        with busy(arguments.busy):
            run = subprocess.run(["make", "test"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        line = line_of(run.stdout, run.returncode, time.monotonic() - began, arguments.busy)
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        is_green &= not line["failed"]
        print(f"{number + 1} of {arguments.times}: {line}", flush=True)
        if line["failed"]:
            print(run.stdout[-20_000:], flush=True)
    return not is_green


if __name__ == "__main__":
    sys.exit(main())
