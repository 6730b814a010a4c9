"""Contestants as long-lived ranks that run in interleaved rounds, and what the rounds say of them.

A contestant is a set of processes that build what they measure once and then wait on a pipe, which costs
nothing, until they are told to run a few steps. One contestant runs at a time. In a round each of them has
its turn, every other round in the reverse order, so that what drifts on the machine meets all of them alike;
two contestants are compared by their ratio in each round, not by figures taken minutes apart.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import NoReturn

from shoal.errors import WorkerError

__all__ = ["Build", "Burst", "Ranks", "Spread", "Step", "free_port", "interleave", "peak_memory"]

Step = Callable[[], float]
"""Makes one optimizer step on this rank, and returns its loss."""
Build = Callable[[int], Step]
"""From the rank to its step; importable by name, as pickle needs it. `torch.distributed` has no group yet."""

_TIMEOUT = 300.0  # seconds for a turn; a framework's first may compile native code
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, slots=True)
class Burst:
    """What a few steps in a row gave.

    Attributes:
        seconds: Wall time of each step; of several ranks, their mean, since the ranks of a step wait for
            one another but need not enter and leave it at the same instant.
        losses: Loss of each step; of several ranks, their mean.
        peak_bytes: Largest resident memory so far; of several ranks, the largest.
    """

    seconds: list[float]
    losses: list[float]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of what several rounds gave."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


class Ranks:
    """The processes of one contestant. They build at once; `run` waits for that.

    Args:
        build: Called in every process, with its rank.
        ranks: Number of processes; each has one compute thread.
    """

    def __init__(self, build: Build, ranks: int) -> None:
        context = get_context("spawn")
        shared = {**_ENVIRONMENT, "MASTER_PORT": str(free_port())}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        # What native libraries read when they are loaded has to be there before the process begins.
        os.environ.update(_ENVIRONMENT)
        self._members = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_serve, args=(theirs, build, rank, environment), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def run(self, steps: int) -> Burst:
        """Makes some steps on all ranks.

        Raises:
            WorkerError: A rank raised, died, or did not end in time; all are ended then.
        """
        for rank, (_, connection) in enumerate(self._members):
            try:
                connection.send(steps)
            except OSError:
                self._fail(rank, "its process died")
        bursts = self._collect()
        return Burst(
            seconds=[fmean(step) for step in zip(*(burst.seconds for burst in bursts), strict=True)],
            losses=[fmean(step) for step in zip(*(burst.losses for burst in bursts), strict=True)],
            peak_bytes=max(burst.peak_bytes for burst in bursts),
        )

    def close(self) -> None:
        """Ends all processes; those that take their time are killed."""
        for _, connection in self._members:
            connection.close()
        for process, _ in self._members:
            process.join(5.0)
            process.kill()
            process.join()
        self._members.clear()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self) -> list[Burst]:
        deadline = time.monotonic() + _TIMEOUT
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        bursts: dict[int, Burst] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(min(waiting.values()), f"it did not end within {_TIMEOUT:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._fail(rank, "its process died")
                if isinstance(answer, str):
                    self._fail(rank, answer.strip().splitlines()[-1], answer)
                bursts[rank] = answer
        return [bursts[rank] for rank in sorted(bursts)]

    def _fail(self, rank: int, reason: str, detail: str = "") -> NoReturn:
        for process, _ in self._members:
            process.kill()  # the others may wait for the failed one without end
        self.close()
        raise WorkerError(rank, reason, detail=detail)


def interleave(
    contestants: Mapping[str, Ranks], rounds: int, steps: int, say: Callable[[str], object]
) -> dict[str, list[Burst]]:
    """Gives every contestant its turn of `steps` steps in every round; returns their bursts by round."""
    bursts: dict[str, list[Burst]] = {name: [] for name in contestants}
    for index in range(rounds):
        say(f"round {index + 1} of {rounds}")
        names = list(contestants)
        for name in reversed(names) if index % 2 else names:
            bursts[name].append(contestants[name].run(steps))
    return bursts


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes.

    `getrusage` would not do: what it gives begins with the size of the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


def _serve(connection: Connection, build: Build, rank: int, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    os.dup2(2, 1)  # stdout is for the table, and some frameworks log to it
    import torch

    try:
        torch.set_num_threads(1)
        step = build(rank)
        torch.set_num_threads(1)  # some frameworks set it to what they think best
        while True:
            connection.send(_burst(step, connection.recv()))
    except (EOFError, BrokenPipeError):
        return
    except BaseException:
        connection.send(traceback.format_exc())


def _burst(step: Step, count: int) -> Burst:
    seconds, losses = [], []
    for _ in range(count):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
    return Burst(seconds, losses, peak_memory())


def free_port() -> int:
    """Returns a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
