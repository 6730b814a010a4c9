"""One worker in each emulated host, and what they are asked to do: build methods, make turns.

The processes live for the whole measurement of a network. Each holds all methods, of which one works at a
time; processes that wait for a question take no time of the cores.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from slow_links_methods import Method, Seat, Step
from torch._C._distributed_c10d import TCPStore

from shoal.errors import WorkerError
from shoal.testing.hosts import Hosts, enter_host

__all__ = ["Turn", "Workers"]

_TIMEOUT = 200.0  # seconds for anything that the workers do
_STORE_PORT = 29500


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn of steps gave.

    Attributes:
        seconds: Seconds of a step, on the slowest worker.
        sent: Payload bytes that the busiest host sent in a step, by its interface's counter.
    """

    seconds: float
    sent: float


class Workers:
    """One process in each host. A context manager.

    Args:
        hosts: The hosts.
        methods: What they can train with.
    """

    def __init__(self, hosts: Hosts, methods: Sequence[Method]) -> None:
        self._hosts = hosts
        self._members = []
        self._count = len(hosts.addresses)
        context = multiprocessing.get_context("spawn")
        for rank, address in enumerate(hosts.addresses):
            ours, theirs = context.Pipe()
            seat = Seat(rank, self._count, address, hosts.addresses[0])
            process = context.Process(
                target=_serve, args=(theirs, seat, hosts.process(rank), tuple(methods)), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._ask("ready")

    def link(self, size: int, operations: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes, the mean of some in a row."""
        seconds: list[float] = self._ask("link", size, operations)
        return max(seconds) / operations

    def build(self, index: int) -> None:
        """Build a method, by its number."""
        self._ask("build", index)

    def run(self, index: int, steps: int) -> Turn:
        """Make steps with a method."""
        before = [self._hosts.traffic(host) for host in range(self._count)]
        seconds = self._ask("run", index, steps)
        traffic = [self._hosts.traffic(host) - known for host, known in enumerate(before)]
        return Turn(max(seconds) / steps, max(each.sent_payload for each in traffic) / steps)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()

    def _ask(self, *question: object) -> list[Any]:
        for _, connection in self._members:
            connection.send(question)
        deadline = time.monotonic() + _TIMEOUT
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        answers: list[Any] = [None] * self._count
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(min(waiting.values()), f"no answer to {question[0]} in {_TIMEOUT:.0f} s")
            for answering in ready:
                assert isinstance(answering, Connection)
                rank = waiting.pop(answering)
                try:
                    failure, answers[rank] = answering.recv()
                except EOFError:
                    failure = "its process died"
                if failure:
                    raise WorkerError(rank, failure)
        return answers


# --- in the processes of the workers ---


def _serve(connection: Connection, seat: Seat, host: int, methods: Sequence[Method]) -> None:
    """Answer until the pipe ends. `host` is the host's process."""
    enter_host(host)
    os.dup2(2, 1)  # stdout is for the table
    os.environ |= {"GLOO_SOCKET_IFNAME": Hosts.interface, "MASTER_ADDR": seat.first_address}
    torch.set_num_threads(1)
    steps: dict[int, Step] = {}
    try:
        store = TCPStore(seat.first_address, _STORE_PORT, seat.workers, is_master=seat.rank == 0)
        dist.init_process_group("shoal", store=store, rank=seat.rank, world_size=seat.workers)
        while True:
            answer: object = None
            match connection.recv():
                case ("link", size, count):
                    buffer = torch.zeros(size // 4)
                    answer = _run(partial(dist.all_reduce, buffer), count)
                case ("build", index):
                    steps[index] = methods[index].build(seat)
                case ("run", index, count):
                    answer = _run(steps[index], count)
            connection.send(("", answer))
    except (EOFError, BrokenPipeError):
        return
    except BaseException:
        connection.send((traceback.format_exc(), None))


def _run(step: Step, count: int) -> float:
    """Return the seconds of some steps in a row."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - start
