"""Starts ranks on this machine, and stands in for them as one process.

torchrun is for ranks on several hosts, which restart. Here all ranks are this process's children and none
restarts, so that it knows which ended before it ended the others: the cause of a failure is among these.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shoal.errors import WorkerError
from shoal.launch.local_ranks import LocalRanks
from shoal.launch.nursery import Nursery
from shoal.launch.outcome import EXIT_STOPPED, Outcome, root_cause

__all__ = ["LAUNCHER", "OUTCOMES", "TERMINAL", "launch"]

LAUNCHER = "SHOAL_LAUNCHER"
"""Environment variable: the process that a rank is a child of, and that it must not outlive."""

OUTCOMES = "SHOAL_OUTCOMES"
"""Environment variable: the folder where a rank that `launch` started leaves its outcome."""

TERMINAL = "SHOAL_TERMINAL"
"""Environment variable: set where what a rank prints on stderr is passed on to a terminal."""

_LOOK = 0.05  # seconds between two looks at which ranks have ended
_SETTLE = 0.5  # seconds in which ranks that fail because of the first to fail end by themselves
_END = 5.0  # seconds for the ranks that are left to end after SIGTERM, when a rank has failed
_SAVE = 600.0  # seconds for ranks to end their step and save, after a signal from outside


def launch(
    command: Sequence[str],
    ranks: int,
    environment: Mapping[str, str] = os.environ,
    *,
    logs: Path | None = None,
    nursery: Nursery | None = None,
) -> int:
    """Runs a command as each of some ranks on this machine, with torchrun's environment.

    A signal (Ctrl-C, SIGTERM, the terminal that closes) is passed on to all ranks, which end their step and
    save; Ctrl-Z stops them until they are continued. When a rank fails, the others are ended. None outlives
    this process, even if it is killed.

    Args:
        command: A program and its arguments; with a nursery, `[sys.executable, "-m", MODULE, ...]`.
        ranks: How many.
        environment: What OMP_NUM_THREADS and GLOO_SOCKET_IFNAME are taken from, if the user set them.
        logs: A directory in which what each rank prints is kept, once the directory is there.
        nursery: Where ranks are forked from; None to start a program for each.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` after a signal if all ranks saved their state.

    Raises:
        WorkerError: A rank failed; it names the one that failed first.
    """
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as folder,
        _store_on_loopback() as port,
        _signals_noted() as signals,
    ):
        environments = [
            {
                **os.environ,
                **_rank_environment(folder, rank, ranks, port, environment),
                LAUNCHER: str(os.getpid() if nursery is None else nursery.pid),
            }
            for rank in range(ranks)
        ]
        with LocalRanks(command, environments, logs, nursery) as processes:
            end = _wait_for_end(processes, signals)
        outcomes = Outcome.read_all(Path(folder))
    if end.signal is not None:
        return _exit_code_after_signal(outcomes, ranks, end.signal.name)
    if set(end.exit_codes.values()) <= {0, EXIT_STOPPED}:
        return max(end.exit_codes.values())
    raise root_cause(outcomes, {rank: code for rank, code in end.exit_codes.items() if code}, end.stopped)


@dataclass(frozen=True, slots=True)
class _End:
    """How ranks ended.

    Attributes:
        exit_codes: Of those that ended by themselves. What this process ended is no cause of a failure.
        stopped: Those that were stopped when the first failed.
        signal: The one that this process got before any rank failed, if any.
    """

    exit_codes: Mapping[int, int]
    stopped: Sequence[int] = ()
    signal: signal.Signals | None = None


def _wait_for_end(processes: LocalRanks, signals: list[signal.Signals]) -> _End:
    """Returns once all ranks have ended, or have been told to and had the time for it."""
    first: signal.Signals | None = None
    deadline = math.inf
    while processes.running() and time.monotonic() < deadline:
        processes.listen(_LOOK)
        while signals:
            number = signals.pop(0)
            if number == signal.SIGTSTP:
                _stop_until_continued(processes)
                continue
            # Ranks heed SIGTERM and Ctrl-C. A terminal that closes is no reason to lose what was trained.
            processes.signal(signal.SIGTERM if number == signal.SIGHUP else number)
            if first is None:
                first, deadline = number, time.monotonic() + _SAVE
        if any(code not in (0, EXIT_STOPPED) for code in processes.exit_codes().values()):
            break
    _listen_for(processes, _SETTLE)
    end = _End(processes.exit_codes(), processes.stopped(), first)
    processes.signal(signal.SIGTERM)
    _listen_for(processes, _END)
    return end


def _listen_for(processes: LocalRanks, seconds: float) -> None:
    """Passes on what ranks print, until all have ended that are not stopped, for that time at most."""
    until = time.monotonic() + seconds
    while set(processes.running()) > set(processes.stopped()) and time.monotonic() < until:
        processes.listen(_LOOK)


def _stop_until_continued(processes: LocalRanks) -> None:
    """Stops the ranks and this process, as Ctrl-Z asks; they go on together."""
    processes.signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    processes.signal(signal.SIGCONT)


def _exit_code_after_signal(outcomes: Sequence[Outcome], ranks: int, signal_name: str) -> int:
    """What became of ranks that a signal was passed on to; raises if they could not save their state."""
    failed = [outcome for outcome in outcomes if outcome.error]
    ended = set(range(ranks)) - {outcome.rank for outcome in outcomes}
    if ended and all(outcome.in_collective for outcome in failed):
        reason = f"ended by {signal_name} before its state was saved"
        raise WorkerError(min(ended), reason, exit_code=130)
    if failed:
        raise root_cause(failed, {})
    # All may have been done when the signal came.
    return max(outcome.exit_code for outcome in outcomes)


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[signal.Signals]]:
    """Within it, signals that a run heeds are appended to a list; one that is ignored stays so (nohup)."""
    received: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    heeded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP)
    before = {number: signal.getsignal(number) for number in heeded}
    before = {number: action for number, action in before.items() if action != signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, action in before.items():
            signal.signal(number, action)


@contextlib.contextmanager
def _store_on_loopback() -> Iterator[int]:
    """The store in which the ranks meet, which no other machine can reach; gives its port.

    torch's own server listens on every interface, except on a socket that it is given.
    """
    from torch._C._distributed_c10d import TCPStore

    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    yield port
    del store


def _rank_environment(
    folder: str, rank: int, ranks: int, port: int, environment: Mapping[str, str]
) -> dict[str, str]:
    threads = max(1, (len(os.sched_getaffinity(0)) or 1) // ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch: the store is there, rank 0 need not serve one
        OUTCOMES: folder,
        **({TERMINAL: "1"} if sys.stderr.isatty() else {}),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(threads),
        # Ranks on one machine need no name service and no network but loopback.
        "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME") or "lo",
    }
