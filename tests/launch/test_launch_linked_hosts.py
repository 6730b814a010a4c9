"""The ranks of several hosts, as the launcher sees them that leads: hosts are the other ends of links."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from shoal.channel import Channel
from shoal.launch.elastic.host import Host
from shoal.launch.elastic.linked_hosts import LinkedHosts
from shoal.release import release


@pytest.fixture
def linked(tmp_path):
    """All ranks of a run on two hosts, of which this one has rank 0."""
    linked = LinkedHosts(Host(None, "a", "10.0.0.1", 1), 1, 2, tmp_path, {"job": ""})
    yield linked
    linked.end()


def come(linked, name):
    """A host comes; the other end of its link."""
    here, there = socket.socketpair()
    first = {"kind": "host", "name": name, "ranks": 1, "version": release()}
    host = Host(Channel(here), name, "10.0.0.2", how_ended=lambda: "its link was cut")
    threading.Thread(target=linked.hear, args=(host, first), daemon=True).start()
    return Channel(there)


def listen_until(linked, condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        linked.listen(0.01)


def names(linked):
    return [host.name for host in linked.hosts]


def test_a_host_that_is_gone_before_it_begins_leaves_its_place_to_the_next(linked):
    first = come(linked, "b")
    listen_until(linked, lambda: names(linked) == ["a", "b"])
    first.close()
    listen_until(linked, lambda: names(linked) == ["a"])
    second = come(linked, "c")
    listen_until(linked, lambda: names(linked) == ["a", "c"])
    assert [list(host.numbers) for host in linked.hosts] == [[0], [1]]
    second.close()


def test_ranks_of_a_host_that_is_lost_have_ended_and_its_outcomes_say_why(linked, tmp_path):
    link = come(linked, "b")
    listen_until(linked, lambda: names(linked) == ["a", "b"])
    assert [host.name for host in linked.start_new(-1)] == ["b"]
    assert linked.running() == [1]
    link.send({"hangs": {"verdict-b-0": "{}"}, "ended": {}})
    link.close()
    listen_until(linked, lambda: not linked.running())
    assert linked.exit_codes() == {1: -9}
    assert "host 10.0.0.2 (b) was lost: its link was cut" in (tmp_path / "rank-00001.json").read_text()
    assert (tmp_path / "verdict-b-0").read_text() == "{}"
