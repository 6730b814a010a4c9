"""Examines this machine for what slows or stops training: RDMA or TCP, GPUs, network cards and NUMA nodes,
idle rails, congestion and pauses, throttled clocks, ECC and Xid errors, busy cores and other processes,
limits, memory and disk. Each row has a verdict (ok, warn, bad, unknown), its evidence, and what to do. Run
it while ranks communicate: rows about traffic compare two moments.

With RUN it prints what each host of a run looked like when the run started.

Exit codes: 0 nothing is bad; 1 at least one row is bad; 2 wrong input.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.cli.table import as_json, paragraph
from shoal.errors import ConfigError, RunError
from shoal.machine.doctor import (
    Finding,
    HostReport,
    LiveMachine,
    Machine,
    RecordedMachine,
    Recorder,
    Verdict,
    Window,
    across_hosts,
    count,
    examine,
    worst,
)
from shoal.spec.run import Run

_MOST_LOG = 64 << 20  # characters
_LONGEST = 3600.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help="the directory of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--seconds", metavar="N", type=float, default=1.0, help="seconds between the two moments (default: 1)"
    )
    parser.add_argument(
        "--nccl-log", metavar="FILE", type=Path, help="what NCCL printed with NCCL_DEBUG=INFO"
    )
    parser.add_argument("--root", metavar="DIR", type=Path, help="examine a recorded machine instead")
    parser.add_argument(
        "--record", metavar="DIR", type=Path, help="also write all that is read into a new folder, for --root"
    )


def run(args: argparse.Namespace) -> int:
    """Examine, and print the table.

    Raises:
        ConfigError: An option cannot work.
        RunError: The path is not a run, or the run has no reports.
    """
    if not 0 <= args.seconds <= _LONGEST:
        raise ConfigError(
            f"--seconds {args.seconds:g} was given",
            possible=f"0 to {_LONGEST:g}; 0 compares no moments",
            change="give another number",
        )
    found = _of_run(args.path) if args.path is not None else {"": _examined(args)}
    verdict = worst(each for findings in found.values() for each in findings)
    if args.json:
        hosts = {host: [asdict(each) for each in findings] for host, findings in found.items()}
        print(as_json({"verdict": verdict, "hosts": hosts}))
    else:
        print(_text(found))
    return int(verdict is Verdict.BAD)


def _of_run(path: Path) -> dict[str, list[Finding]]:
    folder = Run.open(path).path / "doctor"
    reports = HostReport.read_all(folder)
    if not reports:
        raise RunError(
            f"{path} has no report of its hosts",
            possible="a run of `shoal train`, which writes doctor/HOST.json when it starts",
            change="run `shoal doctor` without RUN on the host itself",
        )
    found = {report.host: list(report.findings) for report in reports}
    between = across_hosts(reports)
    return {**({"all hosts": between} if between else {}), **found}


def _examined(args: argparse.Namespace) -> list[Finding]:
    log = None if args.nccl_log is None else _read_log(args.nccl_log)
    if args.root is not None:
        machine, window = _recorded(args.root)
        return examine(machine, window, log=log)
    machine, window = _measured(args.seconds, args.record)
    return examine(machine, window, log=log)


def _recorded(root: Path) -> tuple[Machine, Window]:
    if not any((root / name).is_dir() for name in ("proc", "sys", "commands")):
        raise ConfigError(
            f"--root {root} was given, and that is not a recorded machine",
            possible="a folder with proc/, sys/ or commands/, as `shoal doctor --record DIR` writes it",
            change="give such a folder",
        )
    machine = RecordedMachine(root)
    if not (root / "after").is_dir():
        return machine, Window({}, count(machine), 0.0)
    try:
        seconds = float(machine.read("seconds.txt") or "1")
    except ValueError:
        seconds = 1.0
    return machine, Window(count(machine), count(RecordedMachine(root / "after", root)), max(seconds, 1e-3))


def _measured(seconds: float, record: Path | None) -> tuple[Machine, Window]:
    machine: Machine = LiveMachine()
    later: Machine = machine
    if record is not None:
        if record.exists() and (not record.is_dir() or any(record.iterdir())):
            raise ConfigError(
                f"--record {record} was given, and that exists already",
                possible="a folder that does not exist yet",
                change="give another folder",
            )
        try:
            machine, later = Recorder(machine, record), Recorder(machine, record / "after")
        except OSError as error:
            raise ConfigError(
                f"--record {record} cannot be written: {error.strerror}",
                possible="a folder in a directory that can be written to",
                change="give another folder",
            ) from error
    began, before = time.monotonic(), count(machine)
    if seconds == 0:
        return machine, Window({}, before, 0.0)
    time.sleep(seconds)
    passed, after = max(time.monotonic() - began, 1e-3), count(later)
    if record is not None:
        (record / "seconds.txt").write_text(f"{passed}\n", encoding="utf-8")
    return machine, Window(before, after, passed)


def _read_log(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_LOG)
    except OSError as error:
        raise ConfigError(
            f"--nccl-log {path} cannot be read: {error.strerror}",
            possible="a file with what NCCL printed",
            change="set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=FILE, and give that file",
        ) from error


def _text(found: Mapping[str, Sequence[Finding]]) -> str:
    blocks = []
    for host, findings in found.items():
        width = max((len(each.row) for each in findings), default=0)
        lines = [host] if host else []
        for each in findings:
            indent = " " * (width + 11)
            lines.append(paragraph(f"{each.row:<{width}}  {each.verdict:<7}  {each.found}", indent=indent))
            if each.change:
                lines.append(paragraph(f"{indent}-> {each.change}", indent=f"{indent}   "))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
