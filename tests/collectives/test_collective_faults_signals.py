"""What happens when ranks are signalled, fork, or disagree, and when strangers call."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_ranks import (
    Ranks,
    failure_of,
    form,
    group,
)

from shoal.collectives import Stripes, empty, is_built
from shoal.errors import CollectiveError

pytestmark = pytest.mark.skipif(not is_built(), reason="the native core was not built")

# --- signals ---


def be_signalled(tell: Connection, rank: int, size: int, store: str, is_one_host: bool) -> None:
    form(rank, size, store, is_one_host=is_one_host)
    heard: list[float] = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(time.monotonic()))
    tensor = torch.ones(8)
    tell.send("ready")
    if rank == 1:
        time.sleep(1.5)
    dist.all_reduce(tensor)  # a handler that returns does not disturb it
    tell.send((tensor[0].item(), [time.monotonic() - each for each in heard]))


@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "several hosts"])
def test_signal_handlers_run_while_a_rank_waits(is_one_host: bool) -> None:
    with Ranks(be_signalled, 2, is_one_host) as ranks:
        ranks.hear()
        time.sleep(0.1)
        ranks.send(0, signal.SIGUSR1)
        ((result, ran_before_the_end),) = ranks.hear(0)
        assert result == 2.0
        assert len(ran_before_the_end) == 1
        # It ran within the wait, which is longer than a second, rather than after it.
        assert ran_before_the_end[0] > 0.2


def be_interrupted(tell: Connection, rank: int, size: int, store: str, is_one_host: bool) -> None:
    form(rank, size, store, is_one_host=is_one_host)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tensor = torch.full((8,), float(rank))
    if rank == 1:
        dist.recv(torch.empty(1), 0)
        dist.send(tensor, 0)
        dist.barrier()
        return
    work = dist.irecv(tensor, 1)
    try:
        tell.send("ready")
        work.wait()
    except KeyboardInterrupt:
        tell.send("interrupted")
    dist.send(torch.empty(1), 1)
    work.wait()  # it went on
    dist.barrier()
    tell.send(tensor[0].item())


@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "several hosts"])
def test_a_keyboard_interrupt_ends_a_wait_and_the_message_can_be_waited_for_again(is_one_host: bool) -> None:
    with Ranks(be_interrupted, 2, is_one_host) as ranks:
        assert ranks.hear(0) == ["ready"]
        time.sleep(0.1)
        ranks.send(0, signal.SIGINT)
        assert ranks.hear(0) == ["interrupted"]
        assert ranks.hear(0) == [1.0]


def run_and_be_interrupted(tell: Connection, rank: int, size: int, store: str, is_one_host: bool) -> None:
    form(rank, size, store, is_one_host=is_one_host)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tell.send("ready")
    try:
        if rank == 1:
            time.sleep(3600)
        dist.all_reduce(torch.ones(8))
    except KeyboardInterrupt:
        tell.send("interrupted")
        tell.send(failure_of(lambda: dist.all_reduce(torch.ones(8))))
    except CollectiveError as failure:
        tell.send(failure)


@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "several hosts"])
def test_a_keyboard_interrupt_within_a_collective_gives_the_group_up(is_one_host: bool) -> None:
    with Ranks(run_and_be_interrupted, 3, is_one_host) as ranks:
        ranks.hear()
        time.sleep(0.2)
        ranks.send(0, signal.SIGINT)
        heard, failure = ranks.hear(0, 2)
        assert heard == "interrupted"
        assert (failure.fault, failure.rank) == ("aborted", 0), failure
        assert "signal interrupted rank 0" in str(failure)
        assert ranks.hear(0)[0].fault == "aborted"


def close_in_a_handler(
    tell: Connection, rank: int, size: int, store: str, is_one_host: bool, waits: Callable[[], object]
) -> None:
    form(rank, size, store, is_one_host=is_one_host)
    if rank == 1:
        tell.send("ready")
        tell.send(failure_of(lambda: dist.recv(torch.ones(8), 0)))
        return

    def close(*_: object) -> None:
        dist.destroy_process_group()
        tell.send("closed")

    signal.signal(signal.SIGUSR1, close)
    tell.send("ready")
    tell.send(failure_of(waits))
    gc.collect()
    tell.send([each for each in _threads() if each.startswith("shoal")])


def _threads() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def reduce() -> None:
    dist.all_reduce(torch.ones(8))


def reduce_in_background() -> None:
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    assert work is not None
    work.wait()


def receive() -> None:
    dist.recv(torch.ones(8), 1)


@pytest.mark.parametrize("waits", [reduce, reduce_in_background, receive])
@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "several hosts"])
def test_a_signal_handler_may_close_the_group_that_its_rank_waits_in(
    waits: Callable[[], object], is_one_host: bool
) -> None:
    with Ranks(close_in_a_handler, 2, is_one_host, waits) as ranks:
        ranks.hear()
        time.sleep(0.1)
        ranks.send(0, signal.SIGUSR1)
        assert ranks.hear(0) == ["closed"]
        (failure,) = ranks.hear(0)
        assert failure.fault == "aborted", failure
        assert "the group was closed" in str(failure)
        assert ranks.hear(0) == [[]]  # and nothing of it runs any more
        (left,) = ranks.hear(1)
        assert (left.rank, left.fault) == (0, "peer lost"), left


# --- forked children ---


def have_a_child(tell: Connection, rank: int, size: int, store: str, is_one_host: bool) -> None:
    form(rank, size, store, is_one_host=is_one_host)
    tensor = torch.ones(1000)
    shared = empty(1000).fill_(rank)
    pending = dist.irecv(torch.empty(8), 1 - rank)
    child = os.fork()
    if child == 0:
        failure = failure_of(lambda: dist.all_reduce(tensor))
        assert "forked" in str(failure)
        del pending, shared
        gc.collect()
        empty(1000).fill_(-1.0)  # not the parent's memory
        sys.exit(0)  # with all that runs at Python's exit
    exited = os.waitpid(child, 0)[1]
    for _ in range(3):
        dist.all_reduce(tensor)
        time.sleep(0.3)  # longer, in all, than the heartbeat
    dist.send(torch.ones(8), 1 - rank)
    pending.wait()
    tell.send((os.waitstatus_to_exitcode(exited), tensor[0].item(), shared[0].item()))


@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "several hosts"])
def test_a_forked_child_does_not_disturb_the_group(is_one_host: bool) -> None:
    with Ranks(have_a_child, 2, is_one_host) as ranks:
        assert ranks.hear() == [(0, 8.0, 0.0), (0, 8.0, 1.0)]
        assert ranks.join() == [0, 0]


# --- disagreement ---


def disagree(tell: Connection, rank: int, size: int, store: str, is_one_host: bool) -> None:
    form(rank, size, store, is_one_host=is_one_host, debug=True)
    odd = rank == 1
    four = torch.ones(4)
    calls = {
        "sizes": lambda: dist.all_reduce(torch.ones(8 if odd else 4)),
        "types": lambda: dist.broadcast(torch.ones(4, dtype=torch.int32 if odd else torch.float32), 0),
        "reductions": lambda: dist.all_reduce(four, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "roots": lambda: dist.broadcast(four, 1 if odd else 0),
        "collectives": lambda: dist.barrier() if odd else dist.all_reduce(four),
        "splits": lambda: dist.all_to_all_single(
            torch.empty(size), torch.ones(size + odd), [1] * size, [1] * (size - 1) + [1 + odd]
        ),
    }
    if is_one_host:
        stripes = Stripes([(0, 4), (16 if odd else 12, 4)])
        calls["stripes"] = lambda: group().all_gather_stripes(torch.ones(8), stripes)
    failures = {what: failure_of(call) for what, call in calls.items()}
    dist.all_reduce(four)  # what was not begun disturbs nothing
    tell.send((failures, four[0].item()))


WANTED = {
    "sizes": ("all_reduce of float32, 16 bytes", "all_reduce of float32, 32 bytes"),
    "types": ("broadcast of float32", "broadcast of int32"),
    "reductions": ("SUM", "MAX"),
    "roots": ("root 0", "root 1"),
    "collectives": ("all_reduce", "barrier"),
    "splits": ("all_to_all with 8 bytes", "all_to_all with 4 bytes"),
    "stripes": ("all_gather of float32, 32 bytes, in 2 stripes at",),
}


@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "several hosts"])
def test_ranks_that_call_different_things_are_told_so_when_debugging(is_one_host: bool) -> None:
    with Ranks(disagree, 3, is_one_host) as ranks:
        for rank, (failures, afterwards) in enumerate(ranks.hear()):
            assert afterwards == 3.0
            for what, failure in failures.items():
                assert failure.fault == "mismatch", (what, failure)
                assert failure.rank == (0 if rank == 1 and what != "splits" else 1), (what, failure)
                for each in WANTED[what]:
                    assert each in str(failure), (what, failure)


def differ_once(tell: Connection, rank: int, size: int, store: str, calls: int) -> None:
    form(rank, size, store)
    odd, four = rank == 1, torch.ones(4)
    kinds = (
        lambda: dist.all_reduce(torch.ones(8 if odd else 4)),
        lambda: dist.all_reduce(torch.ones(1 << 20 if odd else 1 << 19)),
        lambda: dist.all_reduce(torch.ones(2 if odd else 4, dtype=torch.float64 if odd else torch.float32)),
        lambda: dist.all_reduce(four, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        lambda: dist.barrier() if odd else dist.all_reduce(four),
        lambda: dist.all_reduce(four) if odd else dist.broadcast(four, 0),
    )

    def call() -> None:
        kinds[calls]()
        dist.barrier()  # a root does not wait for the others: it sees their call in the next one

    dist.all_reduce(four)
    tell.send(failure_of(call))


@pytest.mark.parametrize("calls", range(6))
def test_ranks_of_one_host_that_call_different_things_never_go_on(calls: int) -> None:
    with Ranks(differ_once, 3, calls) as ranks:
        for failure in ranks.hear():
            assert failure.fault == "mismatch", failure
            assert " called " in str(failure)
            assert "where rank " in str(failure)


def send_another_size(tell: Connection, rank: int, size: int, store: str, is_one_host: bool) -> None:
    form(rank, size, store, is_one_host=is_one_host)
    for count in (10, 200_000):
        if rank == 1:
            dist.send(torch.ones(count), 0)
        else:
            tell.send(failure_of(lambda count=count: dist.recv(torch.ones(count + 1), 1)))
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    tell.send(tensor[0].item())


@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "several hosts"])
def test_a_message_of_another_size_is_reported_and_harms_no_other(is_one_host: bool) -> None:
    with Ranks(send_another_size, 2, is_one_host) as ranks:
        for count in (10, 200_000):
            (failure,) = ranks.hear(0)
            assert (failure.fault, failure.rank) == ("mismatch", 1), failure
            assert f"sent {4 * count} bytes where this rank receives {4 * count + 4}" in str(failure)
        assert ranks.hear() == [2.0, 2.0]


def pass_a_monitored_barrier(tell: Connection, rank: int, size: int, store: str, is_one_host: bool) -> None:
    form(rank, size, store, is_one_host=is_one_host)
    long, short = timedelta(seconds=PATIENT), timedelta(seconds=1)
    group().monitored_barrier(long)
    group().monitored_barrier(long, wait_all_ranks=True)
    failures = []
    for wait_all_ranks in (False, True):
        if rank == 0:
            dist.recv(torch.empty(1), 3)
        elif rank == 3:
            dist.send(torch.empty(1), 0)
        if rank in (0, 3):
            failures.append(failure_of(functools.partial(group().monitored_barrier, short, wait_all_ranks)))
        dist.barrier()
    group().monitored_barrier(long)  # nothing of those that failed is left
    tell.send(failures)


PATIENT = 30


@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "several hosts"])
def test_a_monitored_barrier_names_who_did_not_come(is_one_host: bool) -> None:
    with Ranks(pass_a_monitored_barrier, 4, is_one_host) as ranks:
        of_rank_0, of_rank_1, of_rank_2, of_rank_3 = ranks.hear()
        first, all_of_them = of_rank_0
        assert "Rank 1 failed to pass monitoredBarrier" in str(first)
        assert "Ranks 1, 2 failed to pass monitoredBarrier" in str(all_of_them)
        assert (first.rank, first.fault) == (1, "timeout")
        assert of_rank_1 == of_rank_2 == []
        for failure in of_rank_3:
            assert "Rank 3 successfully reached monitoredBarrier" in str(failure)
            assert "rank 1 did not come" in str(failure)


# --- strangers ---


def listen(tell: Connection, rank: int, size: int, store: str) -> None:
    form(rank, size, store, is_one_host=False)
    tell.send(_listening_port())
    tensor = torch.ones(1000)
    for _ in range(20):
        dist.all_reduce(tensor)
        time.sleep(0.02)
    tell.send(tensor[0].item())


def _listening_port() -> int:
    sockets = {
        os.readlink(each.path) for each in os.scandir("/proc/self/fd") if each.is_symlink() and _exists(each)
    }
    for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            address, port = fields[1].split(":")
            assert address == "0100007F", "it listens elsewhere than on the address in use"
            return int(port, 16)
    raise AssertionError("nothing listens")


def _exists(entry: os.DirEntry[str]) -> bool:
    try:
        os.readlink(entry.path)
    except FileNotFoundError:
        return False
    return True


def test_strangers_are_refused_and_do_not_disturb() -> None:
    with Ranks(listen, 2) as ranks:
        port, _ = ranks.hear()
        silent = socket.create_connection(("127.0.0.1", port))
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"shoal/1\n" + bytes(80)):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENT) as stranger:
                challenge = stranger.recv(32)
                assert len(challenge) == 32
                stranger.sendall(noise)
                if len(noise) >= 88:  # a whole hello, whose proof is none
                    with contextlib.suppress(ConnectionResetError):  # closed before all of it was read
                        assert stranger.recv(1) == b""
        assert ranks.hear() == [float(2**20)] * 2
        silent.close()
