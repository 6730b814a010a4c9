"""Stacks of a rank: what Python's faulthandler wrote, and what a debugger of the host prints."""

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
from typing import final

from shoal.signals import withheld_from_children

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
    of_inquest = [at for at, frame in enumerate(frames) if "/shoal/hang/" in frame.file]
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
