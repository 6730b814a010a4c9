"""Plants one fault at a time in a copy of the repository, and tells whether tests notice: `make test-faults`.

Exit codes: 0, every fault was caught that the tables do not mark as missed; 1, one was missed; 2, an option
cannot work, or tests fail with no fault planted; 130, stopped.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from fault_table import Fault, read_table, sources_of

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("runs", "build", "dist", "__pycache__", ".*cache", ".venv*", ".git", ".hypothesis", "*.egg-info")
LIMIT = 120.0
"""Seconds for the tests of a fault on an idle machine, of which one has to fail: a hang tells nobody what is
wrong."""

MARK = "SHOAL_PLANTED_IN"
"""Environment variable: the copy that a process was started in."""


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    Attributes:
        how: "caught"; "missed"; "hung" where the time was up; "broken" where the tests could not run.
        seconds: That the tests took.
        detail: The test that failed, or the end of the output.
    """

    how: str
    seconds: float
    detail: str

    @property
    def caught(self) -> bool:
        """Whether a test noticed."""
        return self.how == "caught"


class Copy:
    """A copy of the repository, in which one fault at a time is planted.

    Args:
        root: Where the copy is made.
        limit: Seconds for the tests of a fault.
    """

    def __init__(self, root: Path, limit: float) -> None:
        self.root, self._limit = root, limit
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT))
        compileall.compile_dir(root / "shoal", quiet=1)

    def with_fault(self, fault: Fault) -> Outcome:
        """Plants, tests, and puts the file back as it was."""
        path = self.root / fault.find(sources_of(self.root))
        core = self.root / "shoal" / "collectives" / "_core.so"
        native = path.is_relative_to(self.root / "csrc")
        if native and not core.exists():
            return Outcome("broken", 0.0, "the native core is not built")
        text, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(fault.change(text), encoding="utf-8")
        Path(cache_from_source(path)).unlink(missing_ok=True)
        try:
            if native:
                core.rename(core.with_suffix(".kept"))
                self._run(["setup.py", "-q", "build_ext", "--inplace"])
                if not core.exists():
                    return Outcome("broken", 0.0, "does not compile")
            return self.tested(fault.tests)
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if native:
                core.with_suffix(".kept").rename(core)

    def tested(self, tests: tuple[str, ...]) -> Outcome:
        """Runs tests up to the first that fails."""
        begun = time.monotonic()
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--hypothesis-profile=faults"]
        code, told = self._run(["-m", "pytest", *options, *tests])
        seconds = time.monotonic() - begun
        if code is None:
            return Outcome("hung", seconds, f"ended after {self._limit:.0f} s")
        if code == 0:
            return Outcome("missed", seconds, "")
        failed = [line for line in told.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if not failed:
            return Outcome("broken", seconds, told[-2000:])
        return Outcome("caught", seconds, failed[0].split(" ", 1)[1].split(" - ")[0])

    def _run(self, words: list[str]) -> tuple[int | None, str]:
        """The exit code, None if the time was up, and the output."""
        # A file that changes twice in a second looks unchanged to Python, so that nothing compiled is kept.
        environment = os.environ | {
            MARK: str(self.root),
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        with subprocess.Popen(
            [sys.executable, *words],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                told, _ = process.communicate(timeout=self._limit)
            except subprocess.TimeoutExpired:
                self.end_all()
                process.communicate()
                return None, ""
        self.end_all()
        return process.returncode, told

    def end_all(self) -> None:
        """Ends what was started in this copy: with a fault in them, tests leave processes behind."""
        mark = f"{MARK}={self.root}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)


def tell(name: str, outcome: Outcome, expected: str) -> None:
    note = f"  (known: {expected})" if expected else ""
    print(f"{outcome.how:<7} {outcome.seconds:5.1f} s  {name}  {outcome.detail}{note}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="this fault alone; may be repeated")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="faults at once (default 1)")
    parser.add_argument(
        "--limit", metavar="S", type=float, default=LIMIT, help=f"seconds for a fault (default {LIMIT:.0f})"
    )
    parser.add_argument(
        "--unchanged", action="store_true", help="run the tests with no fault, which must pass"
    )
    args = parser.parse_args()
    faults = [fault for fault in read_table() if args.only is None or fault.name in args.only]
    if not faults or args.jobs < 1 or len(faults) < len(set(args.only or ())):
        print("faults: there is no such fault, or no job", file=sys.stderr)
        return 2

    if args.unchanged:
        faults = list({fault.tests: fault for fault in faults}.values())

    copies: queue.Queue[Copy] = queue.Queue()
    lock = threading.Lock()

    def one(fault: Fault) -> Outcome:
        copy = copies.get()
        try:
            outcome = copy.tested(fault.tests) if args.unchanged else copy.with_fault(fault)
        finally:
            copies.put(copy)
        with lock:
            tell(fault.name, outcome, fault.missed)
        return outcome

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-faults-") as folder:
        made = [Copy(Path(folder) / str(number), args.limit) for number in range(args.jobs)]
        for copy in made:
            copies.put(copy)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        with ThreadPoolExecutor(args.jobs) as pool:
            try:
                outcomes = list(pool.map(one, faults))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in made:
                    copy.end_all()
                return 130
    minutes = (time.monotonic() - begun) / 60
    if args.unchanged:
        failing = sum(outcome.how != "missed" for outcome in outcomes)
        print(f"{failing} of {len(faults)} sets of tests fail with no fault planted, {minutes:.1f} min")
        return 2 if failing else 0
    caught = sum(outcome.caught for outcome in outcomes)
    least = sum(not fault.missed for fault in faults)
    print(f"{caught} of {len(faults)} faults caught, {least} have to be, {minutes:.1f} min")
    as_told = all(outcome.caught or fault.missed for fault, outcome in zip(faults, outcomes, strict=True))
    return 0 if as_told else 1


if __name__ == "__main__":
    sys.exit(main())
