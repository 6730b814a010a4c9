"""What Linux tells of the machine and of its processes, in /proc."""

from __future__ import annotations

from pathlib import Path

__all__ = ["boot_id", "process_began", "process_state"]


def boot_id() -> str:
    """Return what the kernel calls this start of the machine; "" where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_state(process: int) -> str:
    """Return the kernel's letter for the state of a process; "" if it has ended, or that is not known."""
    return _stat(process)[0]


def process_began(process: int) -> str:
    """Return the ticks from boot to a process's begin; "" if it has ended, or that is not known."""
    return _stat(process)[19]


def _stat(process: int) -> list[str]:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [""] * 20
    fields = stat.rpartition(")")[2].split()  # before it stands the program's name, which may have spaces
    return [""] * 20 if fields[0] in "ZX" else fields
