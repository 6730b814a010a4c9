"""Run a function on several ranks of this machine, in processes that stay alive between calls.

Importing torch takes seconds; forming a process group in a process that has it takes milliseconds. So the
processes of all pools are forked from one that has imported torch and Shoal (multiprocessing's fork server).
Where there are accelerators, each is started as a program instead: what is imported may begin to use them,
and then they do not work after a fork. A pool starts its processes once, and each call forms a group of its
own among the first n of them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, TypeVar

from shoal.errors import WorkerError
from shoal.launch.local import has_accelerators
from shoal.spec.run.writer import close_all

Result = TypeVar("Result")

_PRELOADED = ["shoal.collectives", "shoal.parallel", "transformers.models.llama.modeling_llama"]
"""Modules that the fork server imports, where they are installed, unless the process already has a server."""


class RankPool:
    """Processes that run functions as the ranks of a group.

    A call that fails, or does not end in time, ends all processes; the next call starts new ones.

    Args:
        backend: The backend of `torch.distributed` that the groups use.
        threads: Compute threads of each rank.
    """

    def __init__(self, backend: str = "gloo", threads: int = 1) -> None:
        self._backend = backend
        self._threads = threads
        self._context: SpawnContext | ForkServerContext
        if has_accelerators():
            self._context = multiprocessing.get_context("spawn")
        else:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(_PRELOADED)
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(
        self, function: Callable[..., Result], ranks: int, *arguments: Any, timeout: float = 600.0
    ) -> list[Result]:
        """Call `function(*arguments)` on every rank, within a default process group of that many ranks.

        Args:
            function: A function that can be imported by name, as pickle needs. With one rank it runs without
                a process group.
            ranks: Number of ranks.
            arguments: Arguments, equal for every rank.
            timeout: Seconds after which the call is given up.

        Returns:
            The function's results, by rank.

        Raises:
            WorkerError: A rank raised, died, or did not end in time. The message has its traceback.
        """
        if any(connection.poll() for _, connection in self._workers):  # the end: it has no task
            self.close()
        while len(self._workers) < ranks:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks):
                job = (function, arguments, rank, ranks, f"file://{folder}/store", sys.path)
                self._workers[rank][1].send(job)
            return self._collect(ranks, time.monotonic() + timeout)

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self._backend, self._threads), daemon=True
        )
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def _collect(self, ranks: int, deadline: float) -> list[Any]:
        waiting = {self._workers[rank][1]: rank for rank in range(ranks)}
        results: list[Any] = [None] * ranks
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerError(min(waiting.values()), "it did not end in time")
            failures: list[tuple[float, int, str]] = []
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    when, failure, results[rank] = connection.recv()
                except EOFError:
                    when, failure = 0.0, "its process died"
                if failure:
                    failures.append((when, rank, failure))
            if failures:
                self.close()
                _, rank, failure = min(failures)  # what came first made the others fail
                raise WorkerError(rank, failure)
        return results


def run_ranks(
    function: Callable[..., Result], ranks: int, *arguments: Any, backend: str = "gloo"
) -> list[Result]:
    """Run a function on several ranks like `RankPool.run`, in processes that end with the call."""
    with RankPool(backend) as pool:
        return pool.run(function, ranks, *arguments)


def _serve(connection: Connection, backend: str, threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    import torch.distributed as dist

    import shoal.collectives  # the backend "shoal"

    assert shoal.collectives
    torch.set_num_threads(threads)
    gc.freeze()  # so that garbage collections do not write to pages that ranks share
    while True:
        try:
            function, arguments, rank, ranks, store, path = connection.recv()
        except EOFError:
            return
        sys.path[:] = path
        try:
            if ranks > 1:
                dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
                dist.barrier()  # so that no rank leaves the group before another has formed it
            result = function(*arguments)
        except BaseException:
            # Sent before this rank leaves the group, which makes the others fail: their errors come second.
            connection.send((time.monotonic(), traceback.format_exc(), None))
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        close_all()  # another program may save where this one has
        connection.send((0.0, "", result))
