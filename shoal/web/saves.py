"""The page of checkpoints and failures: what was saved, what a save cost, when ranks began anew, and why."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.errors import ShoalError
from shoal.limits import open_regular
from shoal.predict.cost.outlook import best_interval, seconds_between_failures
from shoal.web.query import Query

_NAME = re.compile(r"step-([0-9]{1,15})(?:\.[0-9]+)?(\.tmp|\.deleted)?")
_CHECKPOINT = re.compile(rb'\n(\{"kind":"checkpoint"[^\n]{0,2000})\n')
_TROUBLE = re.compile(r"error|traceback|exception|killed|failed|lost|refused|not finite|out of memory", re.I)
_STATES = {None: "complete", ".tmp": "being written, or left by a process that died", ".deleted": "deleted"}
_MOST_SAVES = 500
_MOST_LINES = 60
_LOG_TAIL = 128 << 10
_LONGEST_LINE = 500
_HOUR = 3600.0


def saves(run: RunFollower, query: Query) -> dict[str, Any]:
    """Return checkpoints, the pauses they caused, restarts, decisions, and log lines about trouble."""
    notices = []
    try:
        run.refresh()
    except ShoalError as error:
        notices.append(str(error))
    pauses = list(_pauses(run))
    return {
        "notices": notices,
        "account": run.priced_account,
        "checkpoints": _checkpoints(run.run.checkpoints),
        "pauses": pauses,
        "interval": _interval(run, [each["seconds"] for each in pauses]),
        "restarts": _restarts(run),
        "members": _members(run.run.members_file),
        "decisions": [
            {"step": each.step, "exchange": each.exchange, "reason": each.reason}
            for each in run.run.decisions()[-_MOST_LINES:]
        ],
        "trouble": list(_trouble(run.run.log)),
    }


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        try:
            files = [(file.name, file.stat()) for file in path.iterdir() if file.is_file()]
            written = path.stat().st_mtime
        except OSError:  # deleted meanwhile
            continue
        is_whole = match[2] is None and any(name == "manifest.json" for name, _ in files)
        state = _STATES[match[2]] if is_whole or match[2] else "without manifest: not usable"
        found.append(
            {
                "name": path.name,
                "step": int(match[1]),
                "state": state,
                "bytes": sum(status.st_size for _, status in files),
                "files": len(files),
                "written": written,
            }
        )
    return sorted(found, key=lambda each: -each["step"])[:_MOST_SAVES]


def _pauses(run: RunFollower) -> Iterator[dict[str, Any]]:
    """Yield the times for which saves stopped rank 0, or the first rank that has a timeline."""
    restarts = run.files.restarts()
    if not restarts:
        return
    rank = min(restarts)
    parts = restarts[rank]
    origin = parts[0].origin.unix_ns
    with open_regular(run.run.timeline_file(rank)) as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        for number, match in enumerate(_CHECKPOINT.finditer(data)):
            if number >= _MOST_SAVES:
                return
            part = max((each for each in parts if each.begin <= match.start()), key=lambda each: each.begin)
            try:
                fields = json.loads(match[1])
                start, seconds = float(fields["start"]), float(fields["duration"])
            except (ValueError, KeyError, TypeError):
                continue
            offset = (part.origin.unix_ns - origin) / 1e9
            yield {"at": start + offset, "seconds": seconds, "unix": part.origin.unix_ns / 1e9 + start}


def _interval(run: RunFollower, pauses: list[float]) -> dict[str, Any] | None:
    """Return the interval that loses least, by Young, beside the interval of the run; None if not known."""
    config = run.run.description.get("config")
    checkpoint = config.get("checkpoint") if isinstance(config, dict) else None
    speeds = run.metrics.column("step_seconds")
    steps = speeds[speeds > 0]
    if not isinstance(checkpoint, dict) or not pauses or not len(steps):
        return None
    expected, pause, step = checkpoint.get("mtbf"), sum(pauses) / len(pauses), float(np.median(steps))
    if not isinstance(expected, int | float) or not 0 < expected < math.inf:
        return None
    account = run.priced_account or {"failures": 0, "wall_seconds": 0.0, "lost_seconds": {"waiting": 0.0}}
    running = account["wall_seconds"] - account["lost_seconds"]["waiting"]
    between = seconds_between_failures(expected * _HOUR, account["failures"], running)
    seconds = best_interval(pause, between)
    return {
        "every": checkpoint.get("every"),
        "expected_hours": expected,
        "failures": account["failures"],
        "hours": running / _HOUR,
        "mtbf_hours": between / _HOUR,
        "pause": pause,
        "step": step,
        "best_seconds": seconds,
        "best_steps": max(1, round(seconds / step)),
    }


def _restarts(run: RunFollower) -> list[dict[str, Any]]:
    """Return when the processes of ranks began: the first time, and each time after a stop or a failure."""
    begun = list(run.files.restarts().values())
    most = max(map(len, begun), default=0)
    return [
        {
            "number": number,
            "ranks": sum(len(parts) > number for parts in begun),
            "unix": min(parts[number].origin.unix_ns for parts in begun if len(parts) > number) / 1e9,
        }
        for number in range(min(most, _MOST_SAVES))
    ]


def _members(path: Path) -> list[dict[str, Any]]:
    """Return which ranks were lost and came while others trained, the newest last."""
    found = []
    for line in _tail(path).splitlines():
        try:
            told = json.loads(line)
            entry = {"unix": float(told["time"]), "event": str(told["event"])[:40]}
            ranks = {name: [int(rank) for rank in told[name]] for name in ("members", "present")}
            found.append({**entry, **ranks, "reason": str(told.get("reason", ""))[:_LONGEST_LINE]})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # torn, or not of ours
            continue
    return found[-_MOST_SAVES:]


def _tail(path: Path) -> str:
    """Return the end of a text file; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL))
            return file.read(_LOG_TAIL).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _trouble(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield lines of the ranks' logs that tell of trouble, from the end of each file."""
    left = _MOST_LINES
    for path in sorted(folder.glob("rank-*.log")) if folder.is_dir() else []:
        for line in _tail(path).splitlines():
            if _TROUBLE.search(line):
                yield {"log": path.name, "line": line.strip()[:_LONGEST_LINE]}
                left -= 1
                if left == 0:
                    return
