"""Requests of a process to the Linux kernel; on other systems they do nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from shoal.proc import process_began

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def name_process(name: str) -> None:
    """Show this process as `name` in `ps` and `top`, which keep 15 characters of the name.

    It must have no space: what reads /proc/PID/stat word by word, such as Slurm's linuxproc, would not find
    the process, and so send it no signal.
    """
    assert " " not in name
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def die_with(parent: int) -> None:
    """Make the kernel end this process when its parent ends; end it now if the parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended while this process was still importing
        os._exit(1)


def process_age() -> float:
    """Return the seconds since this process began; 0 where the system does not say."""
    try:
        began = int(process_began(os.getpid())) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, AttributeError):
        return 0.0
    return max(0.0, age)
