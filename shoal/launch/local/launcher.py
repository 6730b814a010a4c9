"""Starts ranks on this machine, and represents them as one process.

torchrun is for ranks on several hosts, which restart. Here all ranks are children of this process and none
restarts. So this process knows which ranks ended before it ended the others: the cause of a failure is among
these.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from shoal.analyze.hang import LEDGERS, HangVerdict
from shoal.errors import ConfigError
from shoal.launch.local.fork_server import Nursery
from shoal.launch.local.local_ranks import LAUNCHER, LocalRanks, Processes
from shoal.launch.local.outcome import Outcome, exit_code_of, root_cause
from shoal.launch.local.output import Terminal
from shoal.launch.local.signals import StopRequest, signals_noted
from shoal.launch.submit import EXIT_STOPPED
from shoal.listener import listen, loopback
from shoal.scratch import scratch_folder
from shoal.spec.run import write_event

OUTCOMES = "SHOAL_OUTCOMES"
"""Environment variable: the folder where a rank that `launch` started leaves its outcome."""

TERMINAL = "SHOAL_TERMINAL"
"""Environment variable: the columns of the terminal that a rank's stderr is passed on to, if it is one."""

_LOOK = 0.05  # seconds between checks for ended ranks
SETTLE = 0.5  # seconds for ranks to end by themselves when they fail because of the first failure
END = 5.0  # seconds for the other ranks to end after SIGTERM, when a rank has failed


def launch(
    command: Sequence[str],
    ranks: int,
    environment: Mapping[str, str] = os.environ,
    *,
    logs: Path | None = None,
    events: Path | None = None,
    nursery: Nursery | None = None,
    units: Sequence[Collection[int]] = (),
    grace: float | None = None,
) -> int:
    """Run a command as each of some ranks on this machine, with torchrun's environment.

    A signal (Ctrl-C, SIGTERM, SIGUSR1, the terminal that closes) is passed on to all ranks, which end their
    step and save; a second Ctrl-C ends them at once. Ctrl-Z stops them until they are continued. When a rank
    fails, the others are ended. None outlives this process, even if it is killed.

    Args:
        command: A program and its arguments; with a nursery, `[sys.executable, "-m", MODULE, ...]`.
        ranks: Number of ranks.
        environment: Environment from which OMP_NUM_THREADS and GLOO_SOCKET_IFNAME are taken if set.
        logs: Directory in which each rank's output is kept, once the directory exists.
        events: File of events in which the first failure is noted; None for none.
        nursery: The Nursery that ranks are forked from; None to start a program for each.
        units: Ranks that fail together. If a unit fails the others go on, and the run fails with the last of
            them. Ranks in no unit, such as parameter servers, only help. By default all ranks are one unit.
        grace: Seconds from a signal until the system ends this process; None if it does not.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` after a signal if all ranks saved their state.

    Raises:
        WorkerError: A rank failed; the error names the rank that failed first.
    """
    with scratch_folder() as folder, store_on_loopback() as store:
        master = loopback(), store.port
        environments = rank_environments(str(folder), range(ranks), ranks, master, environment, nursery)
        return _run(command, environments, folder, logs, nursery, units, grace, events=events)


def launch_on_node(
    command: Sequence[str],
    numbers: range,
    ranks: int,
    master: tuple[str, int],
    host: str,
    environment: Mapping[str, str] = os.environ,
    *,
    nursery: Nursery | None = None,
    grace: float | None = None,
) -> int:
    """Run a command as this machine's ranks of a training on several; otherwise like `launch`.

    Args:
        command: A program and its arguments, as for `launch`.
        numbers: The ranks of this machine.
        ranks: Number of ranks of all machines, which have equally many.
        master: Host and port of the store in which all ranks meet, which is there already.
        host: What stands before the lines of this machine's ranks.
        environment: Environment from which OMP_NUM_THREADS and GLOO_SOCKET_IFNAME are taken if set.
        nursery: The Nursery that ranks are forked from; None to start a program for each.
        grace: Seconds from a signal until the system ends this process; None if it does not.
    """
    with scratch_folder() as folder:
        environments = rank_environments(str(folder), numbers, ranks, master, environment, nursery)
        return _run(command, environments, folder, None, nursery, (), grace, Terminal(host))


def _run(
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    folder: Path,
    logs: Path | None,
    nursery: Nursery | None,
    units: Sequence[Collection[int]],
    grace: float | None,
    terminal: Terminal | None = None,
    events: Path | None = None,
) -> int:
    """Start ranks, wait until they have ended, and return the exit code."""
    outputs = [terminal or Terminal()]
    with signals_noted() as signals, LocalRanks(command, environments, logs, nursery, outputs) as processes:
        return wait_for_end(processes, StopRequest(signals, grace), folder, units, events)


def wait_for_end(
    processes: Processes,
    stop: StopRequest,
    folder: Path,
    units: Sequence[Collection[int]] = (),
    events: Path | None = None,
) -> int:
    """Wait until all ranks have ended, or have been told to end and had the time for it.

    Args:
        processes: The ranks, which have started.
        stop: The signals to this process.
        folder: Where the ranks leave their outcomes.
        units: See `launch`.
        events: See `launch`.

    Returns:
        The exit code, as `launch`, whose errors it raises too.
    """
    ranks = set(processes.running()) | processes.exit_codes().keys()
    lost: set[int] = set()
    asked = False
    in_units = {rank for unit in units for rank in unit}
    while processes.running() and not stop.is_late:
        processes.listen(_LOOK)
        stop.pass_on(processes)
        failed = {rank for rank, code in processes.exit_codes().items() if code not in (0, EXIT_STOPPED)}
        if in_units:
            for unit in [each for each in units if not failed.isdisjoint(each) and not lost.issuperset(each)]:
                _give_up(unit, processes, folder)
                lost.update(unit)
            for rank in failed - lost:
                _give_up([rank], processes, folder)
            lost |= failed
            if in_units <= lost:
                _note_failure(events, failed)
                break
            if in_units.isdisjoint(processes.running()):
                stop.deadline = min(stop.deadline, time.monotonic() + END)
        elif failed:
            _note_failure(events, failed)
            break
        elif stop.signal is None and not asked and EXIT_STOPPED in processes.exit_codes().values():
            asked = True  # a signal came to a rank alone: before the first step others would wait for it
            processes.signal(signal.SIGTERM)
    if not stop.is_now:
        listen_for(processes, SETTLE)
    helping = set(processes.running()) - in_units if in_units else set()
    codes, stopped = processes.exit_codes(), processes.stopped()
    if not stop.is_now:
        processes.signal(signal.SIGTERM)
        listen_for(processes, END)
    processes.signal(signal.SIGKILL)
    processes.end()
    hangs = [HangVerdict.read(path) for path in sorted(folder.glob("verdict-*"))]
    hang = hangs[0] if hangs and not units else None  # each of several units counts its ranks from 0
    name = "" if stop.signal is None else stop.signal.name
    return exit_code_of(ranks - lost - helping, Outcome.read_all(folder), codes, stopped, name, hang)


def _note_failure(events: Path | None, failed: Collection[int]) -> None:
    if events is not None:
        write_event(events, "failed", reason=f"ranks {', '.join(map(str, sorted(failed)))} ended")


def listen_for(processes: Processes, seconds: float) -> None:
    """Pass on the ranks' output until all ranks that are not stopped have ended, at most `seconds`."""
    until = time.monotonic() + seconds
    while set(processes.running()) > set(processes.stopped()) and time.monotonic() < until:
        processes.listen(_LOOK)


def _give_up(unit: Collection[int], processes: Processes, folder: Path) -> None:
    """End what is left of a unit that has failed, and say why it did."""
    processes.signal(signal.SIGKILL, unit)
    listen_for(processes, _LOOK)
    codes = {rank: code for rank, code in processes.exit_codes().items() if rank in unit and code}
    told = [outcome for outcome in Outcome.read_all(folder) if outcome.rank in unit]
    reason = root_cause(told, codes)
    print(f"shoal: {reason}; the others go on, if they can", file=sys.stderr)


def open_store(address: str, port: int) -> TCPStore:
    """Open the store in which all ranks meet, on one address of this machine.

    torch's own server listens on every interface unless it gets a socket.

    Args:
        address: The address; empty for all of this machine.
        port: The port; 0 for any that is free.

    Raises:
        ConfigError: It cannot listen there.
    """
    try:
        listening = listen(address, port)
    except OSError as error:
        raise ConfigError(
            f"the ranks cannot meet at {address or 'any address'}, port {port}: {error.strerror or error}",
            possible="an address of the first host, and a port that is free there",
            change="give another --address or --port",
        ) from error
    port = listening.getsockname()[1]
    return TCPStore(
        address or loopback(),
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


@contextlib.contextmanager
def store_on_loopback() -> Iterator[TCPStore]:
    """Open the store in which the ranks meet, which no other machine can reach."""
    yield open_store(loopback(), 0)


def _terminal() -> dict[str, str]:
    if not sys.stderr.isatty():
        return {}
    return {TERMINAL: str(os.get_terminal_size(sys.stderr.fileno()).columns or 80)}


def rank_environments(
    folder: str,
    numbers: range,
    ranks: int,
    master: tuple[str, int],
    environment: Mapping[str, str],
    nursery: Nursery | None = None,
    place: tuple[int, int] | None = None,
) -> dict[int, dict[str, str]]:
    """Return the environment of each rank of a host: torchrun's, and what Shoal's own ranks need beside it.

    Args:
        folder: Where the ranks leave their outcomes.
        numbers: The ranks of this host.
        ranks: Number of ranks of all hosts.
        master: Host and port of the store in which all ranks meet.
        environment: What the ranks get beside this process's environment.
        nursery: The Nursery that the ranks are forked from, if there is one.
        place: The number of this host, and how many there are; None if all have equally many ranks.
    """
    threads = max(1, (len(os.sched_getaffinity(0)) or 1) // len(numbers))
    host, hosts = place or (numbers.start // len(numbers), ranks // len(numbers))
    is_loopback = master[0] == loopback()
    common = {
        **os.environ,
        **environment,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(len(numbers)),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(hosts),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # for torch: the store exists, rank 0 does not serve one
        LAUNCHER: str(os.getpid() if nursery is None else nursery.pid),
        OUTCOMES: folder,
        LEDGERS: folder,
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(threads),
        # Ranks on one machine need no name service and no network but loopback; others find theirs.
        "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME") or ("lo" if is_loopback else ""),
        **(_terminal() if is_loopback else {}),  # lines of several hosts are no place for a bar
    }
    if not common["GLOO_SOCKET_IFNAME"]:
        del common["GLOO_SOCKET_IFNAME"]
    return {
        number: {**common, "RANK": str(number), "LOCAL_RANK": str(local)}
        for local, number in enumerate(numbers)
    }
