"""Real ranks on this machine, one of which makes the others wait for ever, in one of twelve ways."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.analyze.hang import LEDGERS
from shoal.collectives import Options, watch_hangs
from shoal.errors import CollectiveError

TIMEOUT = 2.5
PATIENCE = 40.0
VICTIM = 1


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_for_ever() -> None:
    number = 0
    while True:
        number += 1


class Samples:
    def __getitem__(self, index: int) -> int:
        time.sleep(3600)
        return index


def load_a_sample() -> None:
    Samples()[0]


def wait_for_its_own_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def hold_the_interpreter() -> None:
    sum(range(10**15))  # a loop in native code, which never lets another thread run


def skip_one() -> None:
    dist.barrier()
    dist.all_gather([torch.empty(8)] * 3, torch.ones(8))


def change_the_order() -> None:
    works = [dist.all_gather([torch.empty(8)] * 3, torch.ones(8), async_op=True)]
    works.append(dist.all_reduce(torch.ones(1 << 18), async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()


def send_another_size() -> None:
    dist.all_reduce(torch.ones(1 << 16))
    skip_one()


def send_another_type() -> None:
    dist.all_reduce(torch.ones(1 << 18, dtype=torch.float64))
    skip_one()


def leave_early() -> None:
    atexit._run_exitfuncs()  # as a process that ends by itself; multiprocessing leaves them out
    sys.exit(0)


def write_to_a_pipe_that_nobody_reads() -> None:
    path = Path(os.environ["TMPDIR"]) / "fifo"
    os.mkfifo(path)
    path.write_text("a checkpoint")


def step() -> None:
    """What all ranks do a hundred times, but for the victim the third time."""
    dist.all_reduce(torch.ones(1 << 18))
    dist.barrier()
    dist.all_gather([torch.empty(8)] * 3, torch.ones(8))


def _run(tell: Connection, rank: int, ranks: int, folder: str, act: Callable[[], None], hosts: int) -> None:
    if hosts > 1:
        os.environ |= {"SHOAL_HOST_ID": f"host {rank % hosts}", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {LEDGERS: folder, "TMPDIR": folder, "PATH": ""}  # without a path there is no debugger
    torch.set_num_threads(1)
    watch_hangs(Path(folder, "hang"))
    dist.init_process_group(
        "shoal",
        f"file://{folder}/store",
        timedelta(seconds=TIMEOUT),
        ranks,
        rank,
        pg_options=Options(heartbeat=1.0),
    )
    moment = time.monotonic()
    try:
        for number in range(100):
            moment = time.monotonic()
            (act if number == 2 else step)()
    except CollectiveError as failure:
        tell.send((time.monotonic() - moment, failure.fault, str(failure)))


@functools.cache
def _forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shoal.collectives", __name__])
    return context


def hang(
    folder: Path, act: Callable[[], None], ranks: int = 3, hosts: int = 1
) -> dict[int, tuple[float, str, str]]:
    """What the ranks tell of how it ended; without those that tell nothing."""
    folder.mkdir(exist_ok=True)
    processes, pipes = [], {}
    for rank in range(ranks):
        ours, theirs = _forks().Pipe()
        what = act if rank == VICTIM else step
        process = _forks().Process(target=_run, args=(theirs, rank, ranks, str(folder), what, hosts))
        process.start()
        theirs.close()
        processes.append(process)
        pipes[ours] = rank
    told = {}
    until = time.monotonic() + PATIENCE
    try:
        while set(range(ranks)) - {VICTIM} - set(told) and time.monotonic() < until:
            for pipe in wait(list(pipes), 0.1):
                assert isinstance(pipe, Connection)
                with contextlib.suppress(EOFError):
                    told[pipes[pipe]] = pipe.recv()
                del pipes[pipe]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return told
