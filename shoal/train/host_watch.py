"""Looks at each host when a run starts, and tells the watch of hangs where its reports go."""

from __future__ import annotations

import contextlib
import socket
import sys
import time

from shoal.collectives import watch_hangs
from shoal.doctor import HostReport, LiveMachine, Verdict, examine_quickly, facts
from shoal.launch import World
from shoal.run import Run


def look_at_host(run: Run, world: World, *, unit: int, replaces_ranks: bool) -> None:
    """Examine this host once, warn of what is bad, and send reports of hangs to the run.

    The examination reads some files and takes some milliseconds; `shoal doctor RUN` prints it.

    Args:
        run: The run.
        world: The ranks.
        unit: First rank of this rank's worker, of several; each has reports of its own.
        replaces_ranks: Whether the launcher notices ranks that are lost or stopped, and replaces them. Then
            the others go on at once, and only a timeout is examined.
    """
    watch = watch_hangs(run.log / (f"hang-{unit}" if unit else "hang"))
    if replaces_ranks:
        watch.faults = ("timeout",)
    if world.local_rank != 0:
        return
    machine, host = LiveMachine(), socket.gethostname()
    report = HostReport(
        host=host,
        when=time.time(),
        findings=examine_quickly(machine, [str(run.path)]),
        interfaces=facts(machine),
    )
    with contextlib.suppress(OSError):  # a full disk is reported where it stops training
        report.write(run.path / "doctor")
    for finding in report.findings:
        if finding.verdict is Verdict.BAD:
            print(f"{host}: {finding.row}: {finding.found}; {finding.change}", file=sys.stderr)
