"""What the kernel tells of a process: state, processor time, and where each thread waits."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from shoal.analyze.hang.verdict import Cause, Place
from shoal.signals import withheld_from_children

_PROC = Path("/proc")
_SLEEPS = ("nanosleep",)
_LOCKS = ("futex",)
_FILES = (
    *(
        "pipe",
        "fifo",
        "wait_for_partner",
        "rpc_wait",
        "nfs",
        "fuse",
        "folio_wait",
        "wait_on_page",
        "io_schedule",
    ),
    *("jbd2", "ext4", "xfs", "ceph", "lustre", "cl_sync", "unix_stream", "sock_", "skb_"),
)
_BUSY = 0.2  # share of a core from which a thread counts as running
_SILENT = 2.0  # seconds without a pulse after which no Python thread runs


@final
@dataclass(frozen=True, slots=True)
class Thread:
    """One thread.

    Attributes:
        number: Its id.
        name: Its name.
        state: Linux's letter for its state.
        waits_in: The kernel function in which it waits; empty if it runs or this is not known.
        kernel_stack: Its stack in the kernel; empty if it may not be read.
    """

    number: int
    name: str
    state: str
    waits_in: str
    kernel_stack: str


@final
@dataclass(frozen=True, slots=True)
class Process:
    """A process that exists.

    Attributes:
        pid: Its id.
        state: Linux's letter for the state of its main thread.
        ticks: Processor time that its main thread used, in ticks of 10 ms.
        started: When it started, in ticks since the start of the host: a later process with its id differs.
        threads: Its threads, the main thread first.
    """

    pid: int
    state: str
    ticks: int
    started: int
    threads: tuple[Thread, ...]

    @classmethod
    def look(cls, pid: int) -> Self | None:
        """Return the process; None if it does not exist."""
        main = _stat(_PROC / str(pid) / "task" / str(pid))
        if main is None:
            return None
        _, state, ticks, started = main
        try:
            numbers = sorted(int(each.name) for each in (_PROC / str(pid) / "task").iterdir())
        except OSError:
            numbers = []
        threads = [found for number in numbers if (found := _thread(pid, number)) is not None]
        return cls(pid, state, ticks, started, tuple(sorted(threads, key=lambda each: each.number != pid)))

    def text(self) -> str:
        """Return the threads with their stacks in the kernel."""
        lines = []
        for thread in self.threads:
            place = thread.waits_in or ("runs" if thread.state == "R" else "unknown")
            lines.append(f"thread {thread.number} {thread.name!r}: state {thread.state}, {place}")
            lines += [f"    {line}" for line in thread.kernel_stack.splitlines()]
        return "\n".join(lines)


def place_of(
    process: Process | None,
    *,
    exited: bool = False,
    share: float = 0.0,
    silent: float = 0.0,
    frame: str = "",
    in_collective: bool = False,
) -> Place:
    """Return where the main thread of a rank is.

    Args:
        process: The process; None if it does not exist.
        exited: Whether it noted that it ends by itself.
        share: Share of a core that its main thread used a moment ago.
        silent: Seconds since a Python thread of it last ran.
        frame: The Python line that it is in; empty if that is not known.
        in_collective: Whether its Python stack is within a collective.
    """
    where = f", in {frame}" if frame else ""
    if process is None or process.state in ("Z", "X"):
        if exited:
            return Place(cause=Cause.LEFT, text="ended by itself, before the others")
        return Place(cause=Cause.DEAD, text="is dead: its process was killed, or crashed")
    if process.state in ("T", "t"):
        return Place(cause=Cause.STOPPED, text=f"is stopped (by SIGSTOP, Ctrl-Z or a debugger){where}")
    waits_in = process.threads[0].waits_in if process.threads else ""
    kernel = f" ({waits_in})" if waits_in else ""
    if in_collective:
        return Place(cause=Cause.WAITS, text=f"waits in a collective{where}")
    if silent > _SILENT:
        runs = "runs" if share > _BUSY else "waits in"
        return Place(
            cause=Cause.NATIVE,
            text=f"{runs} native code that holds the interpreter's lock for {silent:.0f} s{kernel}{where}",
        )
    if process.state == "D" or any(name in waits_in for name in _FILES):
        return Place(
            cause=Cause.FILE, text=f"waits for a file, a pipe or a network file system{kernel}{where}"
        )
    if any(name in waits_in for name in _SLEEPS):
        return Place(cause=Cause.SLEEP, text=f"sleeps outside of collectives{kernel}{where}")
    if any(name in waits_in for name in _LOCKS):
        return Place(cause=Cause.LOCK, text=f"waits for a lock of a thread{kernel}{where}")
    if process.state == "R" or share > _BUSY:
        return Place(cause=Cause.LOOP, text=f"computes outside of collectives, {share:.0%} of a core{where}")
    return Place(cause=Cause.OUTSIDE, text=f"is outside of collectives{kernel}{where}")


def start_of(pid: int) -> int:
    """Return when a process started, as `Process.started`; 0 if that is not known."""
    found = _stat(_PROC / str(pid) / "task" / str(pid))
    return 0 if found is None else found[3]


def _thread(pid: int, number: int) -> Thread | None:
    folder = _PROC / str(pid) / "task" / str(number)
    found = _stat(folder)
    if found is None:
        return None
    name, state, _, _ = found
    stack, waits_in = _read(folder / "stack"), _read(folder / "wchan").strip()
    if waits_in in ("", "0") and state != "R":
        waits_in = stack.partition("+")[0].rpartition(" ")[2]
    return Thread(number, name, state, waits_in, stack)


def _stat(folder: Path) -> tuple[str, str, int, int] | None:
    """Return the name, the state, the ticks and the start of a thread; None if it does not exist."""
    text = _read(folder / "stat")
    opening, closing = text.find("("), text.rfind(")")
    fields = text[closing + 1 :].split()
    if opening < 0 or len(fields) < 20:
        return None
    return text[opening + 1 : closing], fields[0], int(fields[11]) + int(fields[12]), int(fields[19])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^(]*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_STANDARD = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_DEBUGGERS = (
    ("eu-stack", "-p", "{pid}"),
    ("py-spy", "dump", "--native", "--pid", "{pid}"),
    ("gdb", "-p", "{pid}", "-batch", "-nx", "-ex", "thread apply all bt 40"),
)


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} ({self.function})"

    @property
    def is_standard(self) -> bool:
        """Whether it belongs to Python's library, or to an installed package."""
        return self.file.startswith((*_STANDARD, "<frozen"))


def read_stacks(text: str) -> dict[int, list[Frame]]:
    """Return the stacks that faulthandler wrote, innermost frame first, by the thread's identifier."""
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            frames = stacks.setdefault(int(match[1], 16), [])
            frames.clear()
        elif match := _FRAME.match(line):
            frames.append(Frame(match[1], int(match[2]), match[3]))
    return stacks


def frame_of(frames: Sequence[Frame]) -> str:
    """Return the line of a stack that tells most: the innermost of the user's code, and what it called."""
    if not frames:
        return ""
    own = next((frame for frame in frames if not frame.is_standard), frames[0])
    return str(own) if own is frames[0] else f"{own}, which called {frames[0]}"


def without_inquest(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return a stack without the frames of an inquest: what the rank waited in when it began to hold it."""
    of_inquest = [at for at, frame in enumerate(frames) if "/shoal/analyze/hang/" in frame.file]
    return frames[of_inquest[-1] + 1 :] if of_inquest else frames


def is_in_collective(frames: Sequence[Frame]) -> bool:
    """Return whether a stack is within a call of the backend "shoal"."""
    return any("/shoal/collectives/" in frame.file for frame in frames)


def native_stacks(pid: int, seconds: float) -> str:
    """Return the native stacks of a process by a debugger of the host; empty without one.

    Args:
        pid: The process, which is not stopped, and is not afterwards.
        seconds: Time for the debugger; it ends after that, and its stacks are lost.
    """
    for command in _DEBUGGERS:
        if shutil.which(command[0]) is None:
            continue
        try:
            with withheld_from_children():
                done = subprocess.run(
                    [word.format(pid=pid) for word in command],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=seconds,
                    check=False,
                    stdin=subprocess.DEVNULL,
                )
        except OSError:
            return ""
        except subprocess.TimeoutExpired:
            # A debugger that is killed while it attaches leaves the process stopped, for good.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            return ""
        return done.stdout
    return ""
