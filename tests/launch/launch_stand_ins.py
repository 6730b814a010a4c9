"""Processes that a test starts and finds again, however they were started and whoever is their parent."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.cli.main import main

MARK = "SHOAL_TEST_MARK"
DEADLINE = 60.0  # seconds until a test gives up waiting; nothing is asserted of how long things take


class Program:
    """A program in a process of its own, whose descendants inherit a mark by which they are found.

    Args:
        arguments: The program and its arguments.
        folder: Where it runs; stdout and stderr go to files there.
        environment: What its environment has besides.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._out, self._err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                arguments,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), MARK: self.mark},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Waits for the program to end; its exit code."""
        return self._process.wait(DEADLINE)

    def ranks(self) -> dict[int, int]:
        """The process of each rank that is running, by the name that it has in `ps`."""
        found = {}
        for process in self._family():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                name = Path(f"/proc/{process}/comm").read_text().strip()
                if name.startswith("shoal-rank-"):
                    found[int(name.rpartition("-")[2])] = process
        return found

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Returns once the condition holds; fails if the program ends before."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self._process.poll() is None, f"it ended before: {self.stderr}"
            assert time.monotonic() < deadline, f"it took too long: {self.stderr}"
            time.sleep(0.02)

    def leaves_no_process(self) -> bool:
        """Whether all that it started ends. A process that was killed takes a moment to be gone."""
        deadline = time.monotonic() + DEADLINE
        while self._family() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._family()

    def kill(self) -> None:
        """Ends all that is left of it; for the end of a test, whatever came of it."""
        for process in self._family():
            try:
                os.kill(process, 9)
            except ProcessLookupError:
                continue
        self._process.wait()

    def commands(self) -> dict[int, str]:
        """The command line of each process that it started."""
        found = {}
        for process in self._family():
            with contextlib.suppress(OSError):
                found[process] = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()
        return found

    def _family(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                content = path.read_bytes()
            except OSError:  # it has ended meanwhile, or is another user's
                continue
            if f"{MARK}={self.mark}".encode() in content:
                found.append(int(path.parent.name))
        return found


def shoal(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli.main", *arguments]


def shoal_here(arguments: Sequence[str], folder: Path) -> int:
    """The program in this process; its exit code."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        return main(arguments)


def steps_made(run: Path) -> int:
    """How many steps the metrics of a run tell of."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0
