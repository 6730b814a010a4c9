"""RankPool: what the tests with several ranks stand on."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from shoal.errors import PlanError, WorkerError
from shoal.launch.local import fork_server, has_accelerators
from shoal.testing import RankPool, run_ranks


@pytest.fixture(scope="module")
def pool():
    """One of its own, since a call that fails ends the processes of a pool."""
    with RankPool() as pool:
        yield pool


def add_ranks(first, second):
    total = torch.tensor([first + second + (dist.get_rank() if dist.is_initialized() else 0)])
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item(), os.getpid(), torch.get_num_threads()


def test_every_rank_gives_its_result_and_the_processes_stay(ranks):
    one = ranks.run(add_ranks, 1, 10, 5)
    two = ranks.run(add_ranks, 2, 10, 5)
    assert [total for total, _, _ in one] == [15]
    assert [total for total, _, _ in two] == [31, 31]
    assert len({process for _, process, _ in two}) == 2
    assert two[0][1:] == one[0][1:] == (ranks.run(add_ranks, 1, 0, 0)[0][1], 1)
    assert os.getpid() not in {process for _, process, _ in two}


def my_rank():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def test_results_are_in_the_order_of_ranks_and_one_rank_has_no_group(ranks):
    assert ranks.run(my_rank, 3) == [(0, 3), (1, 3), (2, 3)]
    assert ranks.run(my_rank, 1) == [None]


def fail_on(rank):
    if my_rank() is not None and dist.get_rank() != rank:
        dist.barrier()  # which the failing rank never comes to
    raise PlanError("of this rank", possible="that", change="this")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def sleep():
    time.sleep(600)


def test_a_failure_names_its_rank_and_the_pool_works_again(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_on, 2, 1)
    assert caught.value.rank == 1
    assert "PlanError: of this rank" in str(caught.value)
    assert "in fail_on" in str(caught.value)  # the traceback
    assert pool.run(my_rank, 1) == [None]

    with pytest.raises(WorkerError, match="rank 0 failed: its process died"):
        pool.run(die, 1)
    assert pool.run(my_rank, 1) == [None]

    with pytest.raises(WorkerError, match="rank 0 failed: it did not end in time"):
        pool.run(sleep, 1, timeout=0.1)
    assert pool.run(my_rank, 1) == [None]


def test_a_process_that_died_between_two_calls_is_replaced(pool):
    _, process, _ = pool.run(add_ranks, 1, 0, 0)[0]
    os.kill(process, signal.SIGKILL)
    while os.path.exists(f"/proc/{process}") and not is_zombie(process):
        time.sleep(0.01)
    assert pool.run(add_ranks, 1, 1, 2)[0][0] == 3


def is_zombie(process):
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def unpicklable():
    return lambda: None


def test_a_result_that_cannot_be_sent_is_told(pool):
    with pytest.raises(WorkerError, match="rank 0 failed"):
        pool.run(unpicklable, 1)


def path_of_modules():
    return sys.path


def test_ranks_import_from_where_the_caller_does(ranks, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    assert ranks.run(path_of_modules, 1)[0][0] == str(tmp_path)


def my_parent():
    return os.getppid()


def test_ranks_are_not_forked_where_there_are_accelerators(monkeypatch, tmp_path):
    """A fork server that imports a module which asks for a GPU leaves ranks that cannot use it."""
    monkeypatch.setattr(fork_server, "_DEVICES", (str(tmp_path),))
    assert has_accelerators()
    with RankPool() as pool:
        assert pool.run(my_parent, 2) == [os.getpid()] * 2
        assert pool.run(add_ranks, 2, 10, 5)[1][0] == 31


def test_processes_end_with_the_pool():
    ((_, process, _),) = run_ranks(add_ranks, 1, 0, 0)
    assert not os.path.exists(f"/proc/{process}")
