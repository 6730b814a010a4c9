"""Examines machines: what slows or stops training on them.

Nouns: Machine (what can be read of a machine, alive or recorded), Window (counters at two moments), Finding
(a verdict about one thing, with evidence and what to do), HostReport (the findings of a host of a run). There
is one file per family of checks. Nothing here imports torch. `shoal doctor` calls `examine`; `shoal train`
calls `examine_quickly` on each host.
"""

from shoal.machine.doctor.examine import HostReport, across_hosts, examine, examine_quickly
from shoal.machine.doctor.machine import (
    Finding,
    LiveMachine,
    Machine,
    RecordedMachine,
    Recorder,
    Verdict,
    Window,
    count,
    worst,
)
from shoal.machine.doctor.nccl import facts

__all__ = [
    "Finding",
    "HostReport",
    "LiveMachine",
    "Machine",
    "RecordedMachine",
    "Recorder",
    "Verdict",
    "Window",
    "across_hosts",
    "count",
    "examine",
    "examine_quickly",
    "facts",
    "worst",
]
