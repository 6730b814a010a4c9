"""Starts ranks on this machine, and represents them as one process.

torchrun is for ranks on several hosts, which restart. Here all ranks are children of this process and none
restarts. So this process knows which ranks ended before it ended the others: the cause of a failure is among
these.
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch._C._distributed_c10d import TCPStore

from shoal.errors import WorkerError
from shoal.hang import LEDGERS, HangVerdict
from shoal.launch.local_ranks import LocalRanks, Processes
from shoal.launch.nursery import Nursery
from shoal.launch.outcome import EXIT_STOPPED, Outcome, root_cause

__all__ = [
    "END",
    "LAUNCHER",
    "OUTCOMES",
    "SAVE",
    "SETTLE",
    "TERMINAL",
    "exit_code_after_signal",
    "launch",
    "listen_for",
    "pass_on_signals",
    "rank_environments",
    "signals_noted",
    "store_on_loopback",
]

LAUNCHER = "SHOAL_LAUNCHER"
"""Environment variable: id of the process that is a rank's parent. A rank must not outlive it."""

OUTCOMES = "SHOAL_OUTCOMES"
"""Environment variable: the folder where a rank that `launch` started leaves its outcome."""

TERMINAL = "SHOAL_TERMINAL"
"""Environment variable: the columns of the terminal that a rank's stderr is passed on to, if it is one."""

_LOOK = 0.05  # seconds between checks for ended ranks
SETTLE = 0.5  # seconds for ranks to end by themselves when they fail because of the first failure
END = 5.0  # seconds for the other ranks to end after SIGTERM, when a rank has failed
SAVE = 600.0  # seconds for ranks to finish their step and save, after an external signal


def launch(
    command: Sequence[str],
    ranks: int,
    environment: Mapping[str, str] = os.environ,
    *,
    logs: Path | None = None,
    nursery: Nursery | None = None,
    units: Sequence[Collection[int]] = (),
) -> int:
    """Run a command as each of some ranks on this machine, with torchrun's environment.

    A signal (Ctrl-C, SIGTERM, the terminal that closes) is passed on to all ranks, which end their step and
    save; Ctrl-Z stops them until they are continued. When a rank fails, the others are ended. None outlives
    this process, even if it is killed.

    Args:
        command: A program and its arguments; with a nursery, `[sys.executable, "-m", MODULE, ...]`.
        ranks: Number of ranks.
        environment: Environment from which OMP_NUM_THREADS and GLOO_SOCKET_IFNAME are taken if set.
        logs: Directory in which each rank's output is kept, once the directory exists.
        nursery: The Nursery that ranks are forked from; None to start a program for each.
        units: Ranks that fail together. If a unit fails the others go on, and the run fails with the last of
            them. Ranks in no unit, such as parameter servers, only help. By default all ranks are one unit.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` after a signal if all ranks saved their state.

    Raises:
        WorkerError: A rank failed; the error names the rank that failed first.
    """
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as folder,
        store_on_loopback() as store,
        signals_noted() as signals,
    ):
        environments = rank_environments(folder, range(ranks), ranks, store.port, environment, nursery)
        with LocalRanks(command, environments, logs, nursery) as processes:
            end = _wait_for_end(processes, signals, folder, units)
        outcomes = Outcome.read_all(Path(folder))
        hangs = [HangVerdict.read(path) for path in sorted(Path(folder).glob("verdict-*"))]
    present = set(range(ranks)) - end.lost
    if end.signal is not None:
        left = [outcome for outcome in outcomes if outcome.rank in present]
        return exit_code_after_signal(left, present, end.signal.name)
    codes = {rank: code for rank, code in end.exit_codes.items() if rank in present}
    if codes and set(codes.values()) <= {0, EXIT_STOPPED}:
        return max(codes.values())
    failed = {rank: code for rank, code in end.exit_codes.items() if code}
    # Each of several units counts its ranks from 0.
    raise root_cause(outcomes, failed, end.stopped, hangs[0] if hangs and not units else None)


@dataclass(frozen=True, slots=True)
class _End:
    """How ranks ended.

    Attributes:
        exit_codes: Exit codes of the ranks that ended by themselves. A rank that this process ended is not
            the cause of a failure.
        stopped: Ranks that were stopped when the first rank failed.
        signal: Signal that this process got before any rank failed, if any.
        lost: Ranks of units without which the others went on.
    """

    exit_codes: Mapping[int, int]
    stopped: Sequence[int] = ()
    signal: signal.Signals | None = None
    lost: frozenset[int] = frozenset()


def _wait_for_end(
    processes: LocalRanks, signals: list[signal.Signals], folder: str, units: Sequence[Collection[int]]
) -> _End:
    """Wait until all ranks have ended, or have been told to end and had the time for it."""
    first: signal.Signals | None = None
    deadline = math.inf
    lost: set[int] = set()
    in_units = {rank for unit in units for rank in unit}
    while processes.running() and time.monotonic() < deadline:
        processes.listen(_LOOK)
        if (number := pass_on_signals(signals, processes)) is not None and first is None:
            first, deadline = number, time.monotonic() + SAVE
        failed = {rank for rank, code in processes.exit_codes().items() if code not in (0, EXIT_STOPPED)}
        if in_units:
            for unit in [each for each in units if not failed.isdisjoint(each) and not lost.issuperset(each)]:
                _give_up(unit, processes, folder)
                lost.update(unit)
            for rank in failed - lost:
                _give_up([rank], processes, folder)
            lost |= failed
            if in_units <= lost:
                break
            if in_units.isdisjoint(processes.running()):
                deadline = min(deadline, time.monotonic() + END)
        elif failed:
            break
    listen_for(processes, SETTLE)
    helping = set(processes.running()) - in_units if in_units else set()
    end = _End(processes.exit_codes(), processes.stopped(), first, frozenset(lost | helping))
    processes.signal(signal.SIGTERM)
    listen_for(processes, END)
    return end


def listen_for(processes: Processes, seconds: float) -> None:
    """Pass on the ranks' output until all ranks that are not stopped have ended, at most `seconds`."""
    until = time.monotonic() + seconds
    while set(processes.running()) > set(processes.stopped()) and time.monotonic() < until:
        processes.listen(_LOOK)


def pass_on_signals(signals: list[signal.Signals], processes: Processes) -> signal.Signals | None:
    """Pass the signals that came on to the ranks; return the first that asks to end, if any."""
    first = None
    while signals:
        number = signals.pop(0)
        if number == signal.SIGTSTP:
            _stop_until_continued(processes)
            continue
        if number == signal.SIGUSR2:  # a profile is asked for
            processes.signal(number)
            continue
        # Ranks obey SIGTERM and Ctrl-C. If the terminal closes, training must not be lost.
        processes.signal(signal.SIGTERM if number == signal.SIGHUP else number)
        first = first or number
    return first


def _stop_until_continued(processes: Processes) -> None:
    """Stop the ranks and this process after Ctrl-Z; they continue together."""
    processes.signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    processes.signal(signal.SIGCONT)


def _give_up(unit: Collection[int], processes: LocalRanks, folder: str) -> None:
    """End what is left of a unit that has failed, and say why it did."""
    processes.signal(signal.SIGKILL, unit)
    listen_for(processes, _LOOK)
    codes = {rank: code for rank, code in processes.exit_codes().items() if rank in unit and code}
    told = [outcome for outcome in Outcome.read_all(Path(folder)) if outcome.rank in unit]
    reason = root_cause(told, codes)
    print(f"shoal: {reason}; the others go on, if they can", file=sys.stderr)


def exit_code_after_signal(outcomes: Sequence[Outcome], ranks: Collection[int], signal_name: str) -> int:
    """Return the exit code after a signal to the ranks; raise WorkerError if one could not save its state."""
    failed = [outcome for outcome in outcomes if outcome.error]
    ended = set(ranks) - {outcome.rank for outcome in outcomes}
    if ended and all(outcome.in_collective for outcome in failed):
        reason = f"ended by {signal_name} before its state was saved"
        raise WorkerError(min(ended), reason, exit_code=130)
    if failed:
        raise root_cause(failed, {})
    # All ranks may have finished when the signal came.
    return max(outcome.exit_code for outcome in outcomes)


@contextlib.contextmanager
def signals_noted() -> Iterator[list[signal.Signals]]:
    """Within this context, append a run's signals to a list; ignored signals stay ignored (nohup)."""
    received: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    heeded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in heeded}
    before = {
        number: action
        for number, action in before.items()
        if action != signal.SIG_IGN or number == signal.SIGUSR2  # which asks for a profile, and ends nothing
    }
    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, action in before.items():
            signal.signal(number, action)


@contextlib.contextmanager
def store_on_loopback() -> Iterator[TCPStore]:
    """Open the store in which the ranks meet, which no other machine can reach.

    torch's own server listens on every interface unless it gets a socket.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    yield TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _terminal() -> dict[str, str]:
    if not sys.stderr.isatty():
        return {}
    return {TERMINAL: str(os.get_terminal_size(sys.stderr.fileno()).columns or 80)}


def rank_environments(
    folder: str,
    numbers: range,
    ranks: int,
    port: int,
    environment: Mapping[str, str],
    nursery: Nursery | None = None,
) -> dict[int, dict[str, str]]:
    """Return the environment of each rank of a host: torchrun's, and what Shoal's own ranks need beside it.

    Args:
        folder: Where the ranks leave their outcomes.
        numbers: The ranks of this host.
        ranks: Number of ranks of all hosts.
        port: Port of the store on this machine.
        environment: What the ranks get beside this process's environment.
        nursery: The Nursery that the ranks are forked from, if there is one.
    """
    threads = max(1, (len(os.sched_getaffinity(0)) or 1) // len(numbers))
    common = {
        **os.environ,
        **environment,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(len(numbers)),
        "GROUP_RANK": str(numbers.start // len(numbers)),
        "GROUP_WORLD_SIZE": str(ranks // len(numbers)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # for torch: the store exists, rank 0 does not serve one
        LAUNCHER: str(os.getpid() if nursery is None else nursery.pid),
        OUTCOMES: folder,
        LEDGERS: folder,
        **_terminal(),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(threads),
        # Ranks on one machine need no name service and no network but loopback.
        "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME") or "lo",
    }
    return {
        number: {**common, "RANK": str(number), "LOCAL_RANK": str(local)}
        for local, number in enumerate(numbers)
    }
