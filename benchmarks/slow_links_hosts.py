"""One worker in each emulated host, and what they are asked to do: build methods, make turns.

The processes live for the whole measurement of a network. Each host of a worker has one for the methods that
meet in a process group, and one for those that meet at parameter servers, without a group. They hold all
methods, of which one works at a time; processes that wait for a question take no time of the cores. The last
hosts have the servers, in one process each.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from slow_links_methods import TOKEN, Method, Seat, Step
from slow_links_small import Timed, train_for
from torch._C._distributed_c10d import TCPStore

from shoal.errors import WorkerError
from shoal.parallel.exchange.server import Server
from shoal.testing.hosts import Hosts, enter_host

__all__ = ["Turn", "Workers"]

_TIMEOUT = 900.0  # seconds for anything that the workers do
_STORE_PORT = 29500
_SERVER_PORT = 29600  # of the servers of the first method


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn of steps gave.

    Attributes:
        seconds: Seconds of a step, on the slowest worker.
        sent: Payload bytes that the busiest host sent in a step, by its interface's counter.
        load: Load average of the machine after the turn.
    """

    seconds: float
    sent: float
    load: float = 0.0


class Workers:
    """One process in each host. A context manager.

    Args:
        hosts: The hosts: those of the workers, and after them those of the servers.
        workers: Number of workers.
        methods: What they can train with.
    """

    def __init__(self, hosts: Hosts, workers: int, methods: Sequence[Method]) -> None:
        self._hosts = hosts
        self._methods = tuple(methods)
        self._count = workers
        addresses, self._processes = hosts.addresses, list[multiprocessing.process.BaseProcess]()
        self._members: dict[bool, list[Connection]] = {False: [], True: []}  # by whether servers join them
        for number in range(max((each.servers for each in methods), default=0)):
            place = workers + number
            self._start(_keep_servers, number, addresses[place], hosts.process(place), self._methods)
        for is_served in {bool(each.servers) for each in methods} | {False}:
            for rank in range(workers):
                seat = Seat(rank, workers, addresses[rank], addresses[0])
                given = (seat, addresses[workers:], hosts.process(rank), self._methods)
                self._members[is_served].append(
                    self._start(_serve_without_group if is_served else _serve_in_group, *given)
                )

    def link(self, size: int, operations: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes, the mean of some in a row."""
        seconds: list[float] = self._ask(False, "link", size, operations)
        return max(seconds) / operations

    def build(self, index: int) -> None:
        """Build a method, by its number."""
        self._ask(bool(self._methods[index].servers), "build", index)

    def train(self, exchange: str, seconds: float, seed: int) -> Timed:
        """Train the small model for some seconds with an exchange without servers."""
        found: list[Timed] = self._ask(False, "train", exchange, seconds, seed)
        return found[0]

    def run(self, index: int, steps: int) -> Turn:
        """Make steps with a method."""
        before = [self._hosts.traffic(host) for host in range(len(self._hosts.addresses))]
        seconds = self._ask(bool(self._methods[index].servers), "run", index, steps)
        traffic = [self._hosts.traffic(host) - known for host, known in enumerate(before)]
        sent = max(each.sent_payload for each in traffic) / steps
        return Turn(max(seconds) / steps, sent, os.getloadavg()[0])

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _start(self, target: Callable[..., None], *given: object) -> Connection:
        """Start a process that is given a pipe; return the other end, after it has said that it is ready."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        self._processes.append(context.Process(target=target, args=(theirs, *given), daemon=True))
        self._processes[-1].start()
        theirs.close()
        return ours

    def _ask(self, is_served: bool, *question: object) -> list[Any]:
        members = self._members[is_served]
        for connection in members:
            connection.send(question)
        deadline = time.monotonic() + _TIMEOUT
        waiting = {connection: rank for rank, connection in enumerate(members)}
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


def _serve_in_group(
    connection: Connection, seat: Seat, servers: Sequence[str], host: int, methods: Sequence[Method]
) -> None:
    """Answer until the pipe ends, as a rank of the default group. `host` is the host's process."""
    _enter(host, seat.first_address)
    store = TCPStore(seat.first_address, _STORE_PORT, seat.workers, is_master=seat.rank == 0)
    dist.init_process_group("shoal", store=store, rank=seat.rank, world_size=seat.workers)
    _answer(connection, seat, servers, methods)


def _serve_without_group(
    connection: Connection, seat: Seat, servers: Sequence[str], host: int, methods: Sequence[Method]
) -> None:
    """Answer until the pipe ends, as a worker that knows servers alone."""
    _enter(host, seat.first_address)
    _answer(connection, seat, servers, methods)


def _keep_servers(_: Connection, number: int, address: str, host: int, methods: Sequence[Method]) -> None:
    """Serve as this server of every method that has so many, each at a port of its own."""
    _enter(host, address)
    threads = [
        threading.Thread(
            target=Server(number, TOKEN, host=address, port=_SERVER_PORT + index).run, args=(1e9,)
        )
        for index, method in enumerate(methods)
        if number < method.servers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _enter(host: int, first_address: str) -> None:
    enter_host(host)
    os.dup2(2, 1)  # stdout is for the table
    os.environ |= {"GLOO_SOCKET_IFNAME": Hosts.interface, "MASTER_ADDR": first_address}
    torch.set_num_threads(1)


def _answer(connection: Connection, seat: Seat, servers: Sequence[str], methods: Sequence[Method]) -> None:
    steps: dict[int, Step] = {}
    try:
        while True:
            answer: object = None
            match connection.recv():
                case ("link", size, count):
                    buffer = torch.zeros(size // 4)
                    answer = _run(partial(dist.all_reduce, buffer), count)
                case ("build", index):
                    method = methods[index]
                    ports = tuple((each, _SERVER_PORT + index) for each in servers[: method.servers])
                    steps[index] = method.build(replace(seat, servers=ports))
                    answer = None
                case ("train", exchange, seconds, seed):
                    answer = train_for(exchange, seat.workers, seconds, seed)
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
