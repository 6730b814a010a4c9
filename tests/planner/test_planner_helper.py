"""A search with a second process finds, plays and shows what one process does."""

import math
import os
import signal
import sys

import pytest
from test_planner_search import EXPERTS, SHAPE, UNLIKE, cluster

import shoal.predict.planner.search as planner_search
from shoal.predict.planner import Search, choose
from shoal.predict.planner.helper_process import can_help, running
from shoal.spec.cluster import Cluster
from shoal.spec.workload import shape, workload_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(autouse=True)
def _always_helps(monkeypatch):
    monkeypatch.setattr(planner_search, "can_help", lambda degrees: True)


def searches(shape, **changes):
    """Two equal searches, the second with a helper."""
    alone, helped = (Search(workload_of(shape), cluster(**changes), 16) for _ in range(2))
    helped.fork()
    return alone, helped


def asked_of(search):
    """What a search finds, when it is asked several things one after another."""
    found = []
    for limit, room, tp in (5, None, None), (1, math.inf, None), (1, None, 2), (3, 1e9, 4), (1, 1.0, None):
        ranking = search.best(limit, lambda degrees, tp=tp: tp in (None, degrees.tp), room)
        found.append((ranking.found, ranking.legal, ranking.played))
    return found, list(search.shared.known.items())


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS, UNLIKE], ids=["dense", "experts", "unlike"])
@pytest.mark.parametrize("network", [1e9, 1e11])
def test_two_processes_find_and_play_what_one_does(shape, network):
    alone, helped = searches(shape, network=network, memory=3e9)
    assert asked_of(helped) == asked_of(alone)


@pytest.mark.parametrize(("model", "machine", "batch"), [("350m", "dgx-a100:16", 64)])
def test_two_processes_choose_and_explain_what_one_does(model, machine, batch):
    asked = workload_of(shape(model)), Cluster.parse(machine), batch
    alone, helped = choose(*asked), choose(*asked, fork=True)
    assert [each.plan for each in helped.candidates] == [each.plan for each in alone.candidates]
    assert list(helped.explain().sentences()) == list(alone.explain().sentences())
    assert list(helped.search.shared.known.items()) == list(alone.search.shared.known.items())


def test_a_search_goes_on_when_its_helper_dies():
    alone, helped = searches(SHAPE)
    os.kill(helped._helper.pid, signal.SIGKILL)
    assert asked_of(helped) == asked_of(alone)
    assert helped._helper is None


def test_a_task_is_done_when_the_helper_dies():
    _, helped = searches(SHAPE)
    os.kill(helped._helper.pid, signal.SIGKILL)
    assert helped.each(_twice, [1, 2, 3], [True, False, True]) == [2, 4, 6]


def test_tasks_that_are_larger_than_a_pipe_reach_a_helper_that_searches():
    _, helped = searches(SHAPE)
    helped._helper.halves(helped.tree.degrees, helped.room, 5)
    numbers = list(range(200_000))
    assert helped.each(_length, [numbers, numbers], [True, False]) == [len(numbers)] * 2


def test_a_helper_ends_with_its_search():
    _, helped = searches(SHAPE)
    pid = helped._helper.pid
    helped._helper = None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_no_process_is_forked_beside_threads_or_without_a_free_core_or_for_a_small_search(monkeypatch):
    def can(degrees=1000, cores=2, threads=1, busy=1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.setattr("threading.active_count", lambda: threads)
        monkeypatch.setattr("shoal.predict.planner.helper_process.running", lambda: busy)
        return can_help(degrees)

    monkeypatch.setattr("sys.platform", "linux")
    assert can()
    assert can(cores=4, busy=3)
    assert not can(degrees=10)
    assert not can(cores=1)
    assert not can(threads=2)
    assert not can(busy=2)
    monkeypatch.setattr("sys.platform", "darwin")
    assert not can()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_runs_includes_this_process():
    assert running() >= 1


def _twice(search, number):
    return 2 * number


def _length(search, numbers):
    return len(numbers)
