"""Space of the file systems that a run writes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.machine import Machine
from shoal.doctor.window import Window
from shoal.units import format_bytes

_LEFT, _LITTLE = 1 << 30, 0.05  # bytes; share


def check_disk(folders: Sequence[str]) -> Callable[[Machine, Window], Iterator[Finding]]:
    """Return a check of the space of the file systems that hold some folders."""

    def check(machine: Machine, window: Window) -> Iterator[Finding]:
        for folder in folders:
            space = machine.space(folder)
            if space is None or not space.total:
                continue
            told = f"{format_bytes(space.free)} of {format_bytes(space.total)} free"
            if space.free < _LEFT:
                yield Finding(f"disk of {folder}", Verdict.BAD, told, "make room: a checkpoint would not fit")
            elif space.free < _LITTLE * space.total:
                yield Finding(f"disk of {folder}", Verdict.WARN, told, "make room before the next checkpoint")
            else:
                yield Finding(f"disk of {folder}", Verdict.OK, told)

    return check
