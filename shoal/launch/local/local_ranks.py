"""Processes of ranks on this machine: starts them, reads their output, signals and ends them."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, final

from shoal.errors import CommunicationError, ConfigError
from shoal.launch.local.fork_server import ForkedRank, Nursery
from shoal.launch.local.output import Output, RankLog, Terminal
from shoal.proc import process_state
from shoal.signals import ANSWERED, withheld_from_children

LAUNCHER = "SHOAL_LAUNCHER"
"""Environment variable: id of the process that is a rank's parent. A rank must not outlive it."""

_AT_ONCE = 1 << 16  # bytes to read from a pipe at once: the capacity of a pipe
_STATES = 0.25  # seconds between two looks at the states of processes


class Processes(Protocol):
    """Processes of ranks, on this host or on several."""

    def running(self) -> list[int]:
        """Return the ranks that have not ended."""

    def exit_codes(self) -> dict[int, int]:
        """Return the exit code of each rank that has ended; negative for the signal that ended it."""

    def stopped(self) -> list[int]:
        """Return the ranks whose processes are stopped."""

    def signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to those of some ranks that have not ended; by default to all."""

    def listen(self, seconds: float) -> None:
        """Pass on the next output of ranks. Return when some was passed on, or after `seconds`."""

    def end(self) -> None:
        """Kill the ranks that are left, and pass on their last output."""


@final
class LocalRanks:
    """Processes of ranks, whose output this process takes. Leaving the context ends those that are left.

    Each rank is a session of its own: Ctrl-C on the terminal reaches this process alone, which decides what
    the ranks are told. What a rank answers is sent to the rank alone; what ends or stops it, SIGKILL and
    SIGSTOP, reaches the processes that it started too.

    Args:
        command: A program and its arguments, equal for all ranks.
        environments: The environment of each rank, by its number.
        logs: The directory in which the output is also kept; None to keep nothing.
        nursery: The Nursery that ranks are forked from; None to start a program for each.
        outputs: What takes the output; by default the terminal of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        logs: Path | None,
        nursery: Nursery | None = None,
        outputs: Sequence[Output] = (),
    ) -> None:
        self._takers = outputs or [Terminal()]
        self._command = command
        self._environments = environments
        self._nursery = nursery
        self._outputs = selectors.DefaultSelector()
        self._logs = {
            rank: RankLog(logs, rank, int(each.get("WORLD_SIZE", len(environments))))
            for rank, each in environments.items()
        }
        self._processes = {rank: self._start(rank, each) for rank, each in environments.items()}
        self._stopped: list[int] = []
        self._looks_again = 0.0  # at the states of processes

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        for key in list(self._outputs.get_map().values()):  # a child that outlives its rank may hold these
            self._close_output(key)
        self._outputs.close()
        for log in self._logs.values():
            log.close()

    def end(self) -> None:
        """Kill the ranks that are left, and pass on their last output."""
        self.signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        while self._outputs.get_map() and self._outputs.select(0):
            self.listen(0)

    def start_again(self, rank: int, changes: Mapping[str, str]) -> None:
        """Start a rank that has ended once more, with some changes of its environment."""
        self._processes[rank] = self._start(rank, {**self._environments[rank], **changes})

    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank, process in self._processes.items() if process.poll() is None]

    def exit_codes(self) -> dict[int, int]:
        """Return the exit code of each rank that has ended; negative for the signal that ended it."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        self._do_without_lost_nursery()
        return {rank: code for rank, code in codes.items() if code is not None}

    def stopped(self) -> list[int]:
        """Return the ranks whose processes are stopped, such as by SIGSTOP or a debugger (Linux).

        Those do not count whose stacks another rank reads with a debugger, to find out why ranks wait.
        It looks at most four times a second.
        """
        if (now := time.monotonic()) >= self._looks_again:
            self._looks_again = now + _STATES
            own = {process.pid for process in self._processes.values()}
            states = {rank: process_state(self._processes[rank].pid) for rank in self.running()}
            stopped = [rank for rank, state in states.items() if state in ("T", "t")]
            self._stopped = [
                rank for rank in stopped if _session_of_tracer(self._processes[rank].pid) not in own
            ]
        return [rank for rank in self._stopped if self._processes[rank].poll() is None]

    @property
    def are_whole(self) -> bool:
        """Whether the outputs of all ranks are open, so that the end of a rank is heard at once."""
        return len(self._outputs.get_map()) == 2 * len(self._processes)

    def signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to those of some ranks that have not ended; by default to all."""
        for rank in self.running():
            if ranks is not None and rank not in ranks:
                continue
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                (os.kill if number in ANSWERED else os.killpg)(self._processes[rank].pid, number)

    def listen(self, seconds: float) -> None:
        """Pass on the next output of ranks. Return when some was passed on, or after `seconds`."""
        if not self._outputs.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._outputs.select(seconds):
            data = os.read(key.fd, _AT_ONCE)
            if data:
                descriptor, log = key.data
                log.write(data)
                for taker in self._takers:
                    taker.add(log.rank, descriptor, data)
            else:
                self._close_output(key)

    def _start(self, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | ForkedRank:
        pipes = [os.pipe() for _ in range(2)]
        outputs = pipes[0][1], pipes[1][1]
        try:
            process = _start(self._command, environment, outputs, self._nursery)
        except CommunicationError:
            self._do_without_lost_nursery()
            process = _start(self._command, environment, outputs, self._nursery)
        for descriptor, (reading, writing) in enumerate(pipes, start=1):
            os.close(writing)
            source = descriptor, self._logs[rank]
            self._outputs.register(os.fdopen(reading, "rb"), selectors.EVENT_READ, source)
        return process

    def _do_without_lost_nursery(self) -> None:
        """Say that the nursery is lost, if it is, and start ranks as programs from now on."""
        if self._nursery is None or not self._nursery.loss:
            return
        loss, self._nursery = self._nursery.loss, None
        print(f"shoal: {loss}, and its ranks with it", file=sys.stderr, flush=True)

    def _close_output(self, key: selectors.SelectorKey) -> None:
        self._outputs.unregister(key.fileobj)
        descriptor, log = key.data
        for taker in self._takers:
            taker.end(log.rank, descriptor)
        assert not isinstance(key.fileobj, int)
        key.fileobj.close()  # type: ignore[attr-defined]


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    outputs: tuple[int, int],
    nursery: Nursery | None,
) -> subprocess.Popen[bytes] | ForkedRank:
    """Start one rank, with these descriptors as its stdout and stderr; modules take signals by `run_rank`."""
    is_module = list(command[:2]) == [sys.executable, "-m"]
    if nursery is not None:
        assert is_module, "a nursery runs modules"
        return nursery.start(command[2], command[3:], environment, outputs)
    try:
        with withheld_from_children() if is_module else contextlib.nullcontext():
            return subprocess.Popen(
                command,
                env={**environment, LAUNCHER: str(os.getpid())},
                stdout=outputs[0],
                stderr=outputs[1],
                start_new_session=True,
            )
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        size = sum(len(name) + len(value) + 2 for name, value in environment.items())
        raise ConfigError(
            f"the environment of a rank has {size} bytes, and the system starts no program with it",
            possible="values of at most 128 KiB, and a quarter of the stack limit in all (ulimit -s)",
            change="unset what the ranks do not need",
        ) from error


def _session_of_tracer(process: int) -> int:
    """Return the session of the debugger that a process is attached to; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
        tracer = int(status.partition("TracerPid:")[2].split()[0])
        return os.getsid(tracer) if tracer else 0
    return 0
