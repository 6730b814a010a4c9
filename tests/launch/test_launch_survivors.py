"""Which members have failed, and which end because another did."""

from __future__ import annotations

import signal
import time

import pytest
from torch._C._distributed_c10d import HashStore

from shoal.launch.elastic.elastic import member_environments
from shoal.launch.elastic.elastic_rank import Membership
from shoal.launch.elastic.roster import Roster, Survivors
from shoal.launch.local import EXIT_AGAIN

ABRT, KILL = -signal.SIGABRT, -signal.SIGKILL


def survivors_of(backend="cpu:gloo,cuda:nccl"):
    store = HashStore()
    roster = Roster(store)
    Membership(0, lambda: store, -1, lambda: None).begin(backend)
    return Survivors(roster), roster


@pytest.mark.parametrize(
    ("codes", "follow"),
    [
        ({0: ABRT}, set()),  # nobody else was lost
        ({0: ABRT, 1: ABRT}, set()),
        ({0: ABRT, 1: KILL}, {0}),  # all in a moment
        ({0: ABRT, 1: 1, 2: ABRT}, {0, 2}),
        ({0: EXIT_AGAIN}, set()),  # its own code, which means nothing yet
        ({0: EXIT_AGAIN, 1: KILL}, set()),
        ({0: 1}, set()),
    ],
)
def test_an_abort_is_of_its_own_unless_another_was_lost(codes, follow):
    assert survivors_of()[0].take(codes) == follow


def test_an_abort_after_a_loss_follows_from_it_once():
    survivors, _ = survivors_of()
    survivors.end([0, 2])
    assert survivors.take({0: ABRT}) == {0}
    assert survivors.take({0: ABRT}) == set()
    assert survivors.take({2: KILL}) == set()


def test_the_code_of_survivors_counts_until_a_member_has_left_the_broken_generation():
    survivors, roster = survivors_of()
    survivors.announce([0, 1, 2], [], is_broken=False)
    survivors.announce([0, 2], [0, 2], is_broken=True)  # the launcher did not know yet that all end
    assert survivors.take({0: EXIT_AGAIN}) == {0}
    roster._store.set("1 has 2", "")
    assert survivors.take({2: EXIT_AGAIN}) == set()
    survivors.announce([0, 2], [2], is_broken=False)
    assert survivors.take({2: EXIT_AGAIN}) == set()


def test_an_abort_under_a_backend_that_reports_failures_is_one():
    survivors, _ = survivors_of("shoal")
    assert survivors.take({0: ABRT, 1: KILL}) == set()


def test_the_next_generation_waits_for_all_survivors_and_a_moment_for_others(monkeypatch):
    survivors, _ = survivors_of()
    began = time.monotonic()
    survivors.end([0, 2])
    assert survivors.are_awaited([1], began)  # they have not ended
    survivors.take({0: EXIT_AGAIN, 2: EXIT_AGAIN})
    monkeypatch.setattr(time, "monotonic", lambda: began + 200)
    assert survivors.are_awaited([1, 2], began)
    assert survivors.are_awaited([1], began + 198)
    assert not survivors.are_awaited([1], began + 100)
    assert not survivors.are_awaited([], began + 199)
    monkeypatch.setattr(time, "monotonic", lambda: began + 2000)
    assert not survivors.are_awaited([1, 2], began)


def test_a_survivor_that_does_not_end_is_killed_and_has_not_failed(monkeypatch, capsys):
    survivors, roster = survivors_of()
    roster.announce([], is_broken=True)
    began = time.monotonic()
    survivors.end([0, 2])
    assert not survivors.late()
    survivors.take({0: EXIT_AGAIN})
    monkeypatch.setattr(time, "monotonic", lambda: began + 31)
    assert survivors.late() == survivors.late() == {2}
    assert survivors.take({2: KILL}) == {2}
    assert not survivors.late()
    assert capsys.readouterr().err.count("did not end within 30 s") == 1


def test_a_watchdog_ends_processes_of_members_and_no_collective_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    made = member_environments(str(tmp_path), range(2), 2, 1234, {}, None)
    assert {each["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for each in made.values()} == {"3"}
