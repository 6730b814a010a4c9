"""Ranks in processes of their own, that may be killed: what they do, and what they tell of how it ended."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shoal.collectives import Options, empty
from shoal.errors import CollectiveError

HEARTBEAT = 2.0
PATIENCE = 120.0
"""Seconds after which a rank that has not told anything counts as hanging."""


@dataclass(frozen=True)
class Ended:
    """How a rank's communication ended: when (of the monotonic clock, which all processes share) and why."""

    moment: float
    fault: str
    rank: int
    text: str


def form(rank: int, size: int, store: str, *, is_one_host: bool = True, **options: Any) -> None:
    """Forms the default group; the ranks take themselves to be on one host, or on a host each."""
    if not is_one_host:
        os.environ |= {"SHOAL_HOST_ID": f"host {rank}", "MASTER_ADDR": "127.0.0.1"}
    timeout = timedelta(seconds=options.pop("timeout", 60))
    chosen = Options(**({"heartbeat": HEARTBEAT} | options))
    init = f"file://{store}"
    dist.init_process_group("shoal", init, timeout, size, rank, pg_options=chosen)
    dist.barrier()


# --- what ranks do for ever, until one is lost; `victim` is the rank that will be ---


def repeat_small_all_reduce(rank: int, victim: int) -> None:
    tensor = torch.ones(256)
    while True:
        dist.all_reduce(tensor)


def repeat_large_all_reduce(rank: int, victim: int) -> None:
    tensor = torch.zeros(16 << 20)
    while True:
        dist.all_reduce(tensor)


def repeat_large_all_reduce_in_shared_buffers(rank: int, victim: int) -> None:
    tensor = empty(16 << 20).zero_()
    while True:
        dist.all_reduce(tensor)


def repeat_asynchronous_operations(rank: int, victim: int) -> None:
    tensors = [torch.zeros(1 << 18) for _ in range(4)]
    while True:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def repeat_large_messages(rank: int, victim: int) -> None:
    size = dist.get_world_size()
    tensor, got = torch.zeros(4 << 20), torch.zeros(4 << 20)
    while True:
        work = dist.isend(tensor, (rank + 1) % size)
        dist.recv(got, (rank - 1) % size)
        assert work is not None
        work.wait()


def call_what_the_victim_never_calls(rank: int, victim: int) -> None:
    if rank == victim:
        time.sleep(3600)
    dist.all_reduce(torch.ones(1 << 20))


def wait_for_a_message_of_the_victim(rank: int, victim: int) -> None:
    if rank == victim:
        time.sleep(3600)
    dist.recv(torch.ones(16), victim)


def wait_in_a_barrier_without_the_victim(rank: int, victim: int) -> None:
    if rank == victim:
        time.sleep(3600)
    dist.barrier()


def compute_and_then_call(rank: int, victim: int) -> None:
    if rank == victim:
        time.sleep(3600)
    time.sleep(0.4)
    while True:
        dist.all_reduce(torch.ones(8))


ACTIVITIES: tuple[Callable[[int, int], None], ...] = (
    repeat_small_all_reduce,
    repeat_large_all_reduce,
    repeat_large_all_reduce_in_shared_buffers,
    repeat_asynchronous_operations,
    repeat_large_messages,
    call_what_the_victim_never_calls,
    wait_for_a_message_of_the_victim,
    wait_in_a_barrier_without_the_victim,
)


def be_lost(
    tell: Connection,
    rank: int,
    size: int,
    store: str,
    is_one_host: bool,
    activity: Callable[..., None],
    victim: int,
) -> None:
    """A rank that tells that it is ready, goes on with an activity until that fails, and tells how."""
    form(rank, size, store, is_one_host=is_one_host)
    tell.send("ready")
    try:
        activity(rank, victim)
    except CollectiveError as failure:
        tell.send(Ended(time.monotonic(), failure.fault, failure.rank, str(failure)))


# --- the processes ---


@functools.cache
def _forks() -> ForkServerContext:
    # Starting torch takes seconds, forking a process that has it milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shoal.collectives", __name__])
    return context


class Ranks:
    """Processes that run `function(tell, rank, size, store, *arguments)`; `hear` gives what they tell.

    Leaving the context kills those that are left.
    """

    def __init__(self, function: Callable[..., None], size: int, *arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = _forks().Pipe()
            store = str(Path(self._folder.name) / "store")
            process = _forks().Process(
                target=_run, args=(function, theirs, rank, size, store, *arguments), daemon=False
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()

    def send(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal, and gives the moment."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        return time.monotonic()

    def hear(self, *ranks: int, patience: float = PATIENCE) -> list[Any]:
        """What each of these ranks tells next; of all ranks, if none is given.

        Raises:
            TimeoutError: One tells nothing.
            EOFError: One ended without a word.
        """
        ranks = ranks or tuple(range(len(self._pipes)))
        heard = []
        deadline = time.monotonic() + patience
        for rank in ranks:
            if not wait([self._pipes[rank]], max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} tells nothing for {patience:g} s")
            try:
                heard.append(self._pipes[rank].recv())
            except EOFError:
                raise EOFError(f"rank {rank} ended without a word") from None
        return heard

    def join(self) -> list[int | None]:
        """The exit codes, once all have ended; None of those that do not."""
        for process in self.processes:
            process.join(PATIENCE)
        return [process.exitcode for process in self.processes]


def _run(function: Callable[..., None], tell: Connection, *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(tell, *arguments)


def group() -> Any:
    return dist.group.WORLD


def failure_of(call: Callable[[], object]) -> CollectiveError:
    try:
        call()
    except CollectiveError as failure:
        return failure
    raise AssertionError("it did not fail")
