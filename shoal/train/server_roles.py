"""What a process of a training with parameter servers is: a rank of a worker, or a server.

Processes 0 to n - 1 are ranks, the ranks of a worker one after another; the others are servers. All meet in
one store: there servers leave their addresses, and process 0 the job. Each worker has a process group of its
own, so that it may be lost, or come later, without the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.collectives.options import address_towards
from shoal.errors import RunError
from shoal.launch.local import StopSignal, World, meet
from shoal.launch.submit import EXIT_STOPPED
from shoal.parallel.exchange.server import Server, Servers
from shoal.record import AppendFile
from shoal.spec.run import Run, shown
from shoal.train.job import Job, nothing_left_to_do
from shoal.values import decode, encode

_ADDRESSES = "servers.json"
"""File of a Run where later workers find the servers; only its owner can read it."""


@dataclass(frozen=True, slots=True)
class Role:
    """A process of a training with parameter servers.

    Attributes:
        world: The ranks of its worker.
        first_rank: Number of its worker's first rank among all.
        job: What process 0 was given.
        done: A message if the training is complete; else empty.
        token: The word that all processes know.
        addresses: Host and port of each server.
        store: Where all processes meet; None for a worker that came later.
        server: The server that it is; None for a rank of a worker.
    """

    world: World
    first_rank: int
    job: Job
    done: str
    token: str
    addresses: Sequence[tuple[str, int]]
    store: Store | None = None
    server: Server | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is the first rank of all, which makes the Run."""
        return self.store is not None and self.first_rank == self.world.rank == 0

    @property
    def ranks_meet(self) -> Store | None:
        """The store in which the ranks of its worker meet; None if `world` says where."""
        return None if self.store is None else PrefixStore(f"worker at {self.first_rank}", self.store)

    def wait_for_run(self) -> None:
        """Return once the first rank has made the Run."""
        if self.store is None:
            return
        if self.is_first:
            publish(self)
            self.store.set("run", "made")
        self.store.get("run")

    def servers(self) -> Servers:
        """Return a rank's way to the servers."""
        mirrored = bool(self.job.plan.exchanged.mirror)
        return Servers(self.addresses, self.token, mirrored=mirrored, timeout=self.job.config.timeout)


def take_role(world: World, job: Job) -> Role:
    """Return this process's part in the training; all processes call it.

    Args:
        world: All processes: ranks and servers.
        job: What this process was given; that of process 0 counts.

    Raises:
        CommunicationError: They did not all meet.
    """
    plan = job.plan
    store = meet(world, timeout=job.config.timeout)
    if world.rank == 0:
        told = job, secrets.token_hex(16), nothing_left_to_do(job)
        store.set("job", encode(told).hex())
    job, token, done = decode(bytes.fromhex(store.get("job").decode()))
    number, size = plan.exchanged.processes, plan.of_worker().ranks
    index, server = world.rank - plan.ranks, None
    if index >= 0:
        server = Server(index, token, host=address_towards(world.master[0]), record=_Record(job, index).write)
        store.set(f"server {index}", json.dumps(server.address))
    addresses = [_address(json.loads(store.get(f"server {each}"))) for each in range(number)]
    if server is not None and plan.exchanged.mirror:
        server.mirror_to(addresses[(index + 1) % number])
    rank = world.rank % size
    own = World(rank=rank, ranks=size, local_rank=world.local_rank, master=world.master)
    return Role(own, world.rank - rank, job, done, token, addresses, store, server)


def serve(role: Role, stop: StopSignal) -> int:
    """Serve as a parameter server until the last worker ends it; return the exit code.

    After a signal it serves until its workers have saved and are gone.
    """
    assert role.server is not None, "the process is a server"
    stop.heed()
    role.server.run(role.job.config.timeout, lambda: stop.received is not None)
    return 0 if stop.received is None else EXIT_STOPPED


@final
class _Record:
    """The file of a Run with each contribution that a server applied, opened at the first one."""

    def __init__(self, job: Job, server: int) -> None:
        self._path = Run(job.path).server_file(server)
        self._file: AppendFile | None = None
        self._lock = threading.Lock()

    def write(self, applied: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                self._file = AppendFile(self._path, "the file of a server's updates", warnings.warn)
            self._file.write(json.dumps(applied) + "\n")


def publish(role: Role) -> None:
    """Leave the servers' addresses in the Run, for workers that join later."""
    path = role.job.path / _ADDRESSES
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"servers": role.addresses, "token": role.token}, file)


def joined_role(world: World, job: Job) -> Role:
    """Return the part of a worker that joins a training that goes on.

    Args:
        world: The ranks of the worker.
        job: The job that it joins.

    Raises:
        RunError: The Run has no servers.
    """
    path = job.path / _ADDRESSES
    try:
        told = json.loads(path.read_text())
        addresses = [_address(each) for each in told["servers"]]
        socket.create_connection(addresses[0], timeout=10.0).close()
    except (OSError, ValueError) as error:
        raise RunError(
            f"--join {shown(job.path)} was given, and its parameter servers cannot be reached: {error}",
            possible="a run that has begun and goes on",
            change="give such a run, or continue one that was stopped with --resume",
        ) from error
    taken = [int(file.stem.removeprefix("rank-")) for file in job.path.glob("timeline/rank-*.jsonl")]
    first = max([job.plan.processes - 1, *taken]) + 1
    return Role(world, first, job, "", told["token"], addresses)


def _address(told: Sequence[Any]) -> tuple[str, int]:
    host, port = told
    return str(host), int(port)
