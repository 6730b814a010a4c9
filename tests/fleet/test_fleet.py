"""A training on several hosts, whose agents are stand-ins."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from agent_stand_ins import (
    DONE,
    LATE,
    LOST,
    SILENT,
    UNREACHABLE,
    WAITS,
    Fails,
    Network,
    OldVersion,
    ReachedAt,
    Stops,
)
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ClusterError, ConfigError, WorkerError
from shoal.launch.fleet import Host, Policy, Work, train_on
from shoal.launch.submit import EXIT_STOPPED

WORK = Work(words=("train",), folder="/", environment={"KEY": "secret"}, ranks=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("shoal.launch.local.launcher.SETTLE", 0.1)
    monkeypatch.setattr("shoal.launch.local.launcher.END", 1.0)
    monkeypatch.setattr("shoal.launch.elastic.linked_hosts._LAST", 0.2)
    monkeypatch.setattr("shoal.launch.fleet.fleet.ALONE", 0.0)
    monkeypatch.setattr("shoal.launch.fleet.fleet._ROOM", 0.0)


def train(does, *, least=2, most=2, restarts=3, strikes=2):
    """Trains on hosts that do as they are told; the network, and the exit code."""
    network = Network({name: list(script) for name, script in does.items()})
    policy = Policy(least=least, most=most, restarts=restarts, pause=0.01, strikes=strikes)
    hosts = [Host(name) for name in does]
    return network, train_on(lambda: hosts, WORK, policy, network.start_agent)


def test_ranks_are_numbered_over_the_hosts_and_meet_at_the_first_one():
    network, code = train({"a": [DONE], "b": [DONE], "c": [DONE]}, most=3)
    assert code == 0
    (told,) = network.attempts
    assert [(host["place"], host["numbers"], host["ranks"]) for host in told.values()] == [
        ([0, 3], [0, 2], 6),
        ([1, 3], [2, 4], 6),
        ([2, 3], [4, 6], 6),
    ]
    assert all(host["store"] == ["127.0.0.1", 4000] for host in told.values())
    assert {job["name"]: job["opens_store"] for job in network.jobs} == {"a": True, "b": False, "c": False}


def test_hosts_may_have_unequal_numbers_of_ranks():
    network = Network({"a": [DONE], "b": [DONE]})
    hosts = [Host("a", ranks=3), Host("b")]
    assert train_on(lambda: hosts, WORK, Policy(least=2, most=2), network.start_agent) == 0
    (told,) = network.attempts
    assert [(host["numbers"], host["ranks"]) for host in told.values()] == [([0, 3], 5), ([3, 5], 5)]


def test_a_spare_host_takes_the_place_of_one_that_was_lost_once_its_ranks_have_ended(capfd, monkeypatch):
    monkeypatch.setattr("shoal.launch.fleet.fleet.ALONE", 0.5)
    network, code = train({"a": [DONE], "b": [LOST], "c": [DONE]})
    assert code == 0
    assert [list(attempt) for attempt in network.attempts] == [["a", "b"], ["a", "c"]]
    assert "host b was lost: ssh ended with exit code 255; started again in 0.5 s" in capfd.readouterr().err


def test_a_host_that_does_not_answer_after_a_failure_was_lost():
    does = {"a": [Fails("CommunicationError: b is gone", in_collective=True)], "b": [SILENT]}
    with pytest.raises(WorkerError) as caught:
        train(does, restarts=0)
    assert str(caught.value) == "rank 2 failed: host b was lost: it does not answer"


def test_what_a_shell_prints_is_shown_with_the_hosts_name_before_it(capfd):
    train({"a": [DONE], "b": [DONE]})
    told = capfd.readouterr().out.splitlines()
    assert sorted(told) == [
        *("[a rank 0] begins", "[a] and ", "[a] welcome to this host"),
        *("[b rank 2] begins", "[b] and ", "[b] welcome to this host"),
    ]


def test_a_host_that_is_not_reached_is_replaced_at_once_and_its_words_are_told(capfd, monkeypatch):
    monkeypatch.setattr("shoal.launch.fleet.fleet.ALONE", 0.5)
    network, code = train({"a": [DONE], "b": [UNREACHABLE], "c": [DONE]})
    assert code == 0
    assert [list(attempt) for attempt in network.attempts] == [["a", "c"]]
    first, *others = capfd.readouterr().err.splitlines()
    cause = "shoal: rank 0 failed: host b did not start: ssh ended with exit code 255"
    assert first.startswith(f"{cause}; started again in 0.01 s")
    assert "[b] no route to host" in others


def test_a_host_that_fails_often_is_left_out_until_too_few_are_left():
    does = {"a": [DONE], "b": [Fails("ValueError: b")]}
    with pytest.raises(ClusterError, match=r"1 of 2 hosts are left.* b \(2\)"):
        train(does, restarts=9)
    network, code = train(does, least=1, restarts=9)
    assert code == 0
    assert [list(attempt) for attempt in network.attempts] == [["a", "b"], ["a", "b"], ["a"]]


def test_the_failure_that_came_first_is_named_with_its_host_whoever_told_first():
    does = {
        "a": [Fails("CommunicationError: b is gone", in_collective=True, when=1.0)],
        "b": [Fails("ValueError: the cause", when=2.0)],
    }
    with pytest.raises(WorkerError) as caught:
        train(does, restarts=0)
    assert str(caught.value) == "rank 2 failed: ValueError: the cause (on b)"
    network, code = train({**does, "a": [*does["a"], DONE], "b": [*does["b"], DONE]})
    assert code == 0
    assert len(network.attempts) == 2


def test_other_hosts_end_after_a_failure_and_are_not_the_cause():
    with pytest.raises(WorkerError, match=r"rank 2 failed: ValueError: b \(on b\)"):
        train({"a": [WAITS], "b": [Fails("ValueError: b")]}, restarts=0)


@pytest.mark.parametrize("code", [2, 130])
def test_what_cannot_get_better_is_not_started_again(code):
    with pytest.raises(WorkerError) as caught:
        train({"a": [Fails("PlanError: wrong", exit_code=code)], "b": [WAITS]})
    assert caught.value.exit_code == code


def test_hosts_with_another_version_are_refused():
    with pytest.raises(ConfigError, match="b has Shoal 0, and a has 1"):
        train({"a": [DONE], "b": [OldVersion()]})


def test_ranks_are_not_to_meet_where_the_first_host_alone_reaches():
    with pytest.raises(ConfigError, match=r"the ranks would meet at 127.0.0.1, which only a reaches"):
        train({"a": [DONE], "b": [ReachedAt("10.0.0.2")]})


def test_a_host_that_waits_for_another_hears_that_the_launcher_is_there():
    assert train({"a": [DONE], "b": [LATE]})[1] == 0


def test_a_host_that_alone_is_told_to_end_is_replaced():
    does = {"a": [Stops(is_told=True), DONE], "b": [Stops(), DONE], "c": [DONE]}
    network, code = train(does)
    assert code == 0
    assert [list(attempt) for attempt in network.attempts] == [["a", "b"], ["b", "c"]]
    assert train(does, restarts=0)[1] == EXIT_STOPPED


def test_a_signal_ends_all_hosts_with_the_exit_code_that_requeues():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    before = signal.getsignal(signal.SIGTERM)
    _, code = train({"a": [WAITS], "b": [WAITS]})
    assert code == EXIT_STOPPED
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_takes_long_to_handle_does_not_stop_the_wait_for_hosts():
    """CPython's SimpleQueue waits without an end if a handler returns after the time to wait is over."""
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.2))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGTERM)).start()
    network = Network({"a": [WAITS]})
    late = []

    def start_agent(host, said):
        late.append(threading.Timer(10, said, [b"late"]))
        late[0].start()
        return network.start_agent(host, said)

    policy = Policy(least=1, most=1, restarts=0)
    try:
        assert train_on(lambda: [Host("a")], WORK, policy, start_agent) == EXIT_STOPPED
    finally:
        late[0].cancel()
        signal.signal(signal.SIGALRM, before)


def test_a_signal_during_the_pause_ends_with_the_failure():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    policy = Policy(least=1, most=1, restarts=3, pause=3600)
    network = Network({"a": [Fails("ValueError: a")]})
    with pytest.raises(WorkerError, match="ValueError: a"):
        train_on(lambda: [Host("a")], WORK, policy, network.start_agent)


class Interrupted(Network):
    """A signal comes while its hosts fail."""

    def begins(self, name, told, secret):
        super().begins(name, told, secret)
        signal.raise_signal(signal.SIGINT)


def test_a_signal_during_a_failure_ends_the_training_too():
    policy = Policy(least=1, most=1, restarts=1, pause=0.01)
    network = Interrupted({"a": [Fails("ValueError: a")]})
    with pytest.raises(WorkerError, match="ValueError: a"):
        train_on(lambda: [Host("a")], WORK, policy, network.start_agent)
    assert len(network.attempts) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 3))
def test_the_hosts_that_failed_least_are_chosen_in_their_order(failed, least, more):
    hosts = [Host(f"h{number}") for number in range(len(failed))]
    failures = dict(zip([host.name for host in hosts], failed, strict=True))
    policy = Policy(least=least, most=least + more, strikes=3)
    usable = [host for host in hosts if failures[host.name] < 3]
    if len(usable) < least:
        with pytest.raises(ClusterError):
            policy.choose(hosts, failures)
        return
    chosen = policy.choose(hosts, failures)
    assert chosen == [host for host in hosts if host in chosen]
    assert len(chosen) == min(len(usable), least + more)
    left = [failures[host.name] for host in usable if host not in chosen]
    assert max(failures[host.name] for host in chosen) <= min(left, default=3)
