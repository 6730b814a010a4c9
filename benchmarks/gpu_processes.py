"""Runs rows of the acceptance run, each in a process of its own with a limit on its time and its memory.

The process of the next row is started while a row runs, imports what rows need, and waits. Nothing of a row
is left when the next one begins: this process adopts what a row's children leave behind, and kills all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_outcome import STOPPED, Line, Row

__all__ = ["Processes", "available_memory"]

_HERE = Path(__file__).resolve().parent
_LOOK = 0.05  # seconds between two looks at a row
_IMPORTS = 90.0  # seconds in which a process imports torch, also from a cold disk
_ENDS = 10.0  # seconds in which the system ends a process that is killed
_LEAST_AVAILABLE = 1 << 30  # bytes of the host's memory that a row has to leave
_TAIL = 1 << 16  # bytes of a log in which these lines are looked for
_SHOWN = 12  # lines of its log that a row shows that did not go well
_PR_SET_CHILD_SUBREAPER = 36


class Processes:
    """Runs rows one after the other; use as a context.

    Args:
        logs: Folder for what rows print.
        folder: Folder in which rows leave files for later ones: `GPU_FOLDER` in their environment.
        memory: Bytes of the host's memory that a row may take.
        is_asked_to_stop: Whether rows should end.
        is_bare: Whether rows import nothing before they begin, as for stand-ins of rows.
    """

    def __init__(
        self,
        logs: Path,
        folder: Path,
        memory: int,
        is_asked_to_stop: Callable[[], bool],
        *,
        is_bare: bool = False,
    ) -> None:
        self._logs, self._folder = logs, folder.resolve()
        self._memory, self._is_asked_to_stop = memory, is_asked_to_stop
        self._options = ["--bare"] if is_bare else []
        self._standby: subprocess.Popen[str] | None = None
        self._number = 0
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Processes:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        _end_all(keep=None)

    def run(self, number: int, row: Row, device: str | None, *, is_last: bool = False) -> Line:
        """Run a row, and return what became of it; commit and date are left out."""
        process, results = self._take()
        self._await_ready(process, results)
        if not is_last:
            self._prepare()
        began = time.monotonic()
        given = {"function": row.function, "arguments": dict(row.arguments), "device": device}
        with contextlib.suppress(BrokenPipeError):  # it ended before; its exit code says how
            assert process.stdin is not None
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.close()
        killed = self._watch(process, began + row.seconds)
        seconds = time.monotonic() - began
        is_left = not _end_all(keep=self._standby)
        line = _line(number, row, _read(results), killed, process.returncode)
        log = _tail(results.with_suffix(".log")) if line.outcome not in ("right", "short") else ()
        if is_left:
            line = dataclasses.replace(line, reason=f"{line.reason}; a process of it could not be killed")
        return dataclasses.replace(line, seconds=round(seconds, 1), log=log)

    def _take(self) -> tuple[subprocess.Popen[str], Path]:
        if self._standby is None:
            self._prepare()
        process, self._standby = self._standby, None
        assert process is not None
        return process, self._logs / f"{self._number:03d}.json"

    def _await_ready(self, process: subprocess.Popen[str], results: Path) -> None:
        """Return once a process has imported what rows need, or will not: that is not the row's time."""
        until = time.monotonic() + _IMPORTS
        while process.poll() is None and not self._is_asked_to_stop() and time.monotonic() < until:
            if _read(results):
                return
            time.sleep(_LOOK)

    def _prepare(self) -> None:
        """Start the process of the next row."""
        self._number += 1
        results = self._logs / f"{self._number:03d}.json"
        results.unlink(missing_ok=True)
        paths = [str(_HERE.parent), str(_HERE), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "GPU_FOLDER": str(self._folder),
        }
        with results.with_suffix(".log").open("w") as log:
            self._standby = subprocess.Popen(
                [sys.executable, str(_HERE / "gpu_row.py"), str(results), *self._options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen[str], until: float) -> str:
        """Wait for a row; return the outcome if it had to be killed, else an empty text."""
        while process.poll() is None:
            if time.monotonic() > until:
                return "hung"
            if self._is_asked_to_stop():
                return "not run"
            beside = set() if self._standby is None else {self._standby.pid}
            taken = _resident(_descendants(os.getpid(), without=beside))
            if taken > self._memory or available_memory() < _LEAST_AVAILABLE:
                return "no memory"
            time.sleep(_LOOK)
        return ""


def _line(number: int, row: Row, written: list[dict[str, Any]], killed: str, code: int | None) -> Line:
    """Return a row's line from what it wrote, and how its process ended."""
    ended = next((each for each in written if "outcome" in each), None)
    reasons = {
        "not run": STOPPED,
        "hung": f"killed after its budget of {row.seconds:g} s",
        "no memory": "killed, as it took too much of the host's memory",
    }
    if ended is not None:
        outcome, reason = ended["outcome"], ended["reason"]
    elif killed:
        outcome, reason = killed, reasons[killed]
    elif code is not None and code < 0:
        known = {each.value: each.name for each in signal.Signals}
        outcome, reason = "failed", f"its process was ended by {known.get(-code, f'signal {-code}')}"
    else:
        outcome, reason = "failed", f"its process ended with exit code {code} before it had a result"
    findings = tuple((each["text"], each["figures"]) for each in written if "text" in each)
    machine = next((each["machine"] for each in written if "machine" in each), "")
    return Line.of(number, row, outcome, reason, findings=findings, machine=machine)


def _read(results: Path) -> list[dict[str, Any]]:
    """Return what a row wrote, without a torn last line."""
    written = []
    with contextlib.suppress(FileNotFoundError):
        for text in results.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                each = json.loads(text)
                written += [each] if isinstance(each, dict) else []
    return written


def _tail(log: Path) -> tuple[str, ...]:
    """Return the last lines of a log, without the paths of this machine."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        text = file.read().decode("utf-8", errors="replace").strip()
    home = os.path.expanduser("~")
    for folder in (str(_HERE.parent), sys.prefix, sys.base_prefix, *([home] if len(home) > 1 else [])):
        text = text.replace(f"{folder}/", "")
    return tuple(line[:300] for line in text.splitlines()[-_SHOWN:])


def _descendants(root: int, without: set[int]) -> list[int]:
    """Return the processes below `root`, without some and what is below those."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in without:
                found.append(child)
                waiting.append(child)
    return found


def available_memory() -> int:
    """Return the bytes of the host's memory that processes can still take."""
    text = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2]
    return int(text.split()[0]) * 1024


def _resident(processes: list[int]) -> int:
    """Return the bytes that processes hold by themselves: shared pages count for nobody."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError, IndexError):
            _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
            total += (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return total


def _end_all(keep: subprocess.Popen[str] | None) -> bool:
    """Kill all processes below this one but one; return whether they have ended."""
    without = set() if keep is None else {keep.pid}
    until = time.monotonic() + _ENDS
    while left := _descendants(os.getpid(), without):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # it is not this process's own child
                os.waitpid(process, os.WNOHANG)
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK)
    return True
