"""Finds out what every rank of a host does, when one of them waits too long.

One rank of each host does it for all ranks there, because a rank that hangs cannot. It reads their ledgers,
makes them write their Python stacks by a signal (faulthandler answers it also while native code runs), and
asks the kernel for the state of their threads. The result goes to a file for each rank and one for the host;
the verdict is over the ranks of all hosts whose files it sees.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

from shoal.analyze.hang.call_log import Pages
from shoal.analyze.hang.process import (
    Process,
    frame_of,
    is_in_collective,
    native_stacks,
    place_of,
    read_stacks,
    without_inquest,
)
from shoal.analyze.hang.verdict import Cause, HangVerdict, RankState, judge

STACKS_SIGNAL = signal.SIGRTMIN + 5
"""Signal on which a rank with a ledger writes its Python stacks."""

_SAMPLE = 0.3  # seconds over which processor time is measured
_STACKS = 1.5  # seconds for ranks to write their stacks
_OTHERS = 3.0  # seconds for other hosts to write their files
_DEBUG, _DEBUGGERS = 4.0, 4  # seconds for a debugger, and how many run at once
_FRESH = 60.0  # seconds during which files of other hosts belong to the same hang
_CALLS = 20  # calls of a group that a rank's file shows


@final
@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of this host: its global rank and its process."""

    rank: int
    pid: int


@dataclass(slots=True)
class _Found:
    """What was found out about one rank."""

    state: RankState
    python: str
    kernel: str


@dataclass(frozen=True, slots=True)
class _HostFile:
    """What a host has written down: when, of which group, and the states of its ranks."""

    when: float
    group: str
    states: list[RankState]


def hold_inquest(
    peers: Sequence[Peer], *, ledgers: Path, folder: Path, host: str, group: str, ranks: int, reason: str
) -> HangVerdict:
    """Find out what the ranks of this host do, write it down, and return the verdict over all ranks.

    Args:
        peers: The ranks of this host.
        ledgers: Folder of their ledgers.
        folder: Folder for the files; it is made.
        host: Name of this host, different from those of the other hosts.
        group: Name of the ranks' group, the same on all hosts; files of other groups do not count.
        ranks: Number of ranks on all hosts.
        reason: The error that a rank met.
    """
    found = _examine(peers, ledgers, host)
    states = [each.state for each in found]
    # What cannot be written is only lost for readers after the run. The stacks come first: another host that
    # sees this host's file may end the run.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for each in found:
            _write(_file(folder, each), _text(each, reason))
        data = {
            "when": time.time(),
            "group": group,
            "reason": reason,
            "states": [state.as_json() for state in states],
        }
        _write(folder / f"host-{host}.json", json.dumps(data))
    verdict = judge(_with_other_hosts(states, folder, group, ranks))
    causes = [each for each in found if each.state.rank in verdict.ranks and _is_alive(each.state)]
    with contextlib.suppress(OSError):
        _write(folder / "verdict.txt", f"{verdict}\n")
        with ThreadPoolExecutor(_DEBUGGERS) as pool:
            native = pool.map(lambda each: native_stacks(each.state.pid, _DEBUG), causes[:_DEBUGGERS])
            for each, text in zip(causes, native, strict=False):
                if text:
                    _write(_file(folder, each), f"{_text(each, reason)}\n--- Native stacks\n{text}")
    return verdict


def read_states(folder: Path) -> list[RankState]:
    """Return the states of the last hang in a folder; files that are torn, or older, are left out."""
    files = list(_files(folder))
    last, group = max(((each.when, each.group) for each in files), default=(0.0, ""))
    return [
        state for each in files if each.group == group and last - each.when < _FRESH for state in each.states
    ]


def _file(folder: Path, found: _Found) -> Path:
    return folder / f"rank-{found.state.rank:05d}.txt"


def _examine(peers: Sequence[Peer], ledgers: Path, host: str) -> list[_Found]:
    pages = {peer.pid: Pages.of(peer.pid, ledgers) for peer in peers}
    before = {peer.pid: _process(peer.pid, pages[peer.pid]) for peer in peers}
    began = time.monotonic()
    sizes = {pid: _size(found.stacks) for pid, found in pages.items() if found is not None and found.answers}
    for peer in peers:
        process = before[peer.pid]
        if peer.pid in sizes and process is not None and process.state not in "TtZX":
            with contextlib.suppress(OSError):
                os.kill(peer.pid, STACKS_SIGNAL)
    time.sleep(_SAMPLE)
    passed = time.monotonic() - began
    after = {peer.pid: _process(peer.pid, pages[peer.pid]) for peer in peers}
    return [
        _found(
            peer,
            host,
            pages[peer.pid],
            after[peer.pid],
            _share(before[peer.pid], after[peer.pid], passed),
            _stacks(pages[peer.pid], after[peer.pid], sizes.get(peer.pid, 0), began),
        )
        for peer in peers
    ]


def _process(pid: int, pages: Pages | None) -> Process | None:
    """Return the process of a rank; None if it ended, also if a later process has its id."""
    process = Process.look(pid)
    is_later = process is not None and pages is not None and process.started != pages.started
    return None if is_later else process


def _found(
    peer: Peer, host: str, pages: Pages | None, process: Process | None, share: float, python: str
) -> _Found:
    stacks = read_stacks(python) if pages is not None else {}
    frames = without_inquest(stacks.get(pages.main_thread, [])) if pages is not None else []
    silent = time.monotonic() - pages.pulse if pages is not None else 0.0
    place = place_of(
        process,
        exited=pages is not None and pages.exited,
        share=share,
        silent=silent,
        frame=frame_of(frames),
        in_collective=is_in_collective(frames),
    )
    groups = pages.groups if pages is not None else {}
    state = RankState(rank=peer.rank, host=host, pid=peer.pid, place=place, groups=groups)
    return _Found(state, python, process.text() if process is not None else "")


def _share(before: Process | None, after: Process | None, seconds: float) -> float:
    if before is None or after is None:
        return 0.0
    return (after.ticks - before.ticks) / os.sysconf("SC_CLK_TCK") / seconds


def _stacks(pages: Pages | None, process: Process | None, size: int, began: float) -> str:
    """Return what a rank has written to its file of stacks since the signal."""
    if pages is None or process is None or process.state in "TtZX":
        return ""
    text = ""
    while time.monotonic() - began < _STACKS:
        with contextlib.suppress(OSError), pages.stacks.open(encoding="utf-8", errors="replace") as file:
            file.seek(size)
            if (now := file.read()) and now == text:
                return now  # it has stopped growing
            text = now
        time.sleep(0.05)
    return text


def _with_other_hosts(own: Sequence[RankState], folder: Path, group: str, ranks: int) -> list[RankState]:
    """Return the states of this host and of those hosts that write to the same folder."""
    until = time.monotonic() + _OTHERS
    while True:
        others = (each for each in _files(folder) if each.group == group and _is_fresh(each.when))
        found = {state.rank: state for each in others for state in each.states}
        found |= {state.rank: state for state in own}
        if len(found) >= ranks or time.monotonic() > until:
            return list(found.values())
        time.sleep(0.1)


def _files(folder: Path) -> Iterator[_HostFile]:
    for path in sorted(folder.glob("host-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            data = json.loads(path.read_text(encoding="utf-8"))
            states = [RankState.from_json(each) for each in data["states"]]
            yield _HostFile(float(data["when"]), str(data["group"]), states)


def _is_fresh(when: float) -> bool:
    return abs(time.time() - when) < _FRESH


def _is_alive(state: RankState) -> bool:
    gone = (Cause.DEAD, Cause.LEFT, Cause.STOPPED)
    return state.place is not None and state.place.cause not in gone


def _text(found: _Found, reason: str) -> str:
    state = found.state
    place = state.place.text if state.place is not None else "unknown"
    parts: Mapping[str, str] = {
        f"rank {state.rank}, process {state.pid} on {state.host}": f"It {place}.\nError met: {reason}",
        "Last calls": "\n".join(_calls(state)) or "none recorded",
        "Python stacks": found.python or "none: the process cannot answer",
        "Threads in the kernel": found.kernel or "none: the process is gone",
    }
    return "\n\n".join(f"--- {title}\n{body.rstrip()}" for title, body in parts.items()) + "\n"


def _calls(state: RankState) -> Iterator[str]:
    for group in state.groups.values():
        yield f"group of ranks {', '.join(map(str, group.ranks))}"
        for call in group.calls[-_CALLS:]:
            yield f"  {call.number:8} {call}  {'finished' if call.finished else 'NOT FINISHED'}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)
