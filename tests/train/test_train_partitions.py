"""Networks that are cut while hosts train, in network namespaces: only one side goes on."""

from __future__ import annotations

import re
import time

import pytest
from hosts_stand_ins import Cluster, trained_on_one_host

from shoal.testing.hosts import Hosts, why_no_hosts

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts"),
]
PORT = 29800
ENDED = "the ranks here are ended, and this host tries to join again"


def start(cluster: Cluster, network: Hosts, index: int, *, fault: str = "", who: str = "", hold: str = ""):
    at = f"{network.addresses[0]}:{PORT}"
    given = {"NAMESPACE": str(network.process(index)), "HOLD": hold}
    return cluster.start(at, fault=fault, who=who, **given)


@pytest.fixture(scope="module")
def unbroken(programs, tmp_path_factory, tiny_run):
    """The losses of two and of three ranks, with a batch that both share evenly."""
    folder = tmp_path_factory.mktemp("unbroken")
    return trained_on_one_host(programs, folder, tiny_run, 2, "--set", "batch=6")


def require_equal(cluster: Cluster, unbroken: dict[int, float]) -> None:
    assert cluster.losses == pytest.approx(unbroken, rel=1e-4), cluster.told


WORDS = ["--set", "batch=6", "--plan", "shard=zero1", "--set", "checkpoint.memory=1"]


def test_of_two_hosts_that_of_the_store_goes_on_and_the_other_comes_back(
    programs, tmp_path, tiny_run, unbroken
):
    with Hosts(2) as network, Cluster(programs, tmp_path, tiny_run, "1:2", *WORDS) as cluster:
        first = start(cluster, network, 0, hold='"came"')
        first.wait_for("this host leads")
        other = start(cluster, network, 1, fault="wait", who="1")
        cluster.wait_for("faulty")
        network.cut(1)
        cluster.go()
        other.wait_for(ENDED)
        first.wait_for("was silent for 15 s; 1 go on")
        network.heal(1)
        assert first.end() == 0, cluster.told
        assert other.end() == 0, cluster.told
        require_equal(cluster, unbroken)


def test_a_store_that_less_than_half_of_the_hosts_can_reach_lets_nobody_train(
    programs, tmp_path, tiny_run, unbroken
):
    with Hosts(3) as network, Cluster(programs, tmp_path, tiny_run, "1:3", *WORDS) as cluster:
        first = start(cluster, network, 0)
        first.wait_for("this host leads")
        others = [start(cluster, network, 1, fault="wait", who="1")]
        first.wait_for("2 of 3 hosts")
        others.append(start(cluster, network, 2))
        cluster.wait_for("faulty")
        network.cut(0)
        cluster.go()
        for each in others:
            each.wait_for(ENDED)
        first.wait_for("more than half of the hosts cannot be reached")
        made = cluster.losses
        time.sleep(5)
        assert cluster.losses == made
        network.heal(0)
        assert [each.end() for each in cluster.hosts] == [0, 0, 0], cluster.told
        assert "from the beginning" not in first.told
        require_equal(cluster, unbroken)


def test_the_larger_side_goes_on_if_it_has_the_store(programs, tmp_path, tiny_run, unbroken):
    with Hosts(3) as network, Cluster(programs, tmp_path, tiny_run, "1:3", *WORDS) as cluster:
        first = start(cluster, network, 0)
        first.wait_for("this host leads")
        second = start(cluster, network, 1)
        first.wait_for("2 of 3 hosts")
        cut_off = start(cluster, network, 2, fault="wait", who="2")
        cluster.wait_for("faulty")
        network.cut(2)
        cluster.go()
        cut_off.wait_for(ENDED)
        assert first.end() == 0, cluster.told
        assert second.end() == 0, cluster.told
        require_equal(cluster, unbroken)


def test_a_cut_that_heals_soon_loses_no_host(programs, tmp_path, tiny_run, unbroken):
    with Hosts(2) as network, Cluster(programs, tmp_path, tiny_run, "1:2", *WORDS) as cluster:
        first = start(cluster, network, 0)
        first.wait_for("this host leads")
        other = start(cluster, network, 1, fault="wait", who="1")
        cluster.wait_for("faulty")
        network.cut(1)
        cluster.go()
        time.sleep(8)  # ranks count each other as lost after 5 s, launchers after 15 s
        network.heal(1)
        assert first.end() == 0, cluster.told
        assert other.end() == 0, cluster.told
        require_equal(cluster, unbroken)
        assert ENDED not in other.told


def test_a_host_that_hears_but_is_not_heard_is_lost(programs, tmp_path, tiny_run, unbroken):
    with Hosts(2) as network, Cluster(programs, tmp_path, tiny_run, "1:2", *WORDS) as cluster:
        first = start(cluster, network, 0)
        first.wait_for("this host leads")
        other = start(cluster, network, 1, fault="wait", who="1")
        cluster.wait_for("faulty")
        network.mute(1)
        cluster.go()
        other.wait_for(ENDED)
        assert first.end() == 0, cluster.told
        require_equal(cluster, unbroken)


@pytest.mark.parametrize("when", ["before they train", "while they train"])
def test_of_two_hosts_that_cannot_reach_each_other_one_is_left_out(
    programs, tmp_path, tiny_run, unbroken, when
):
    words = [*WORDS, "--set", "timeout=10"]
    with Hosts(3) as network, Cluster(programs, tmp_path, tiny_run, "2:3", *words) as cluster:
        if when == "before they train":
            network.part(1, 2)
        first = start(cluster, network, 0)
        first.wait_for("this host leads")
        others = [start(cluster, network, 1, fault="wait", who="1")]
        first.wait_for("2 of 3 hosts")
        others.append(start(cluster, network, 2))
        if when == "while they train":
            cluster.wait_for("faulty")
            network.part(1, 2)
        cluster.go()
        assert first.end() == 0, cluster.told
        assert sorted(other.end() for other in others) == [0, 1], cluster.told
        assert re.search(r"host 10\.77\.0\.[23].* is left out: it and host 10\.77\.0\.[23]", first.told)
        left = next(other for other in others if other.end() == 1)
        assert "cannot reach each other" in left.told
        require_equal(cluster, unbroken)


def test_a_link_that_is_too_slow_for_the_timeout_ends_the_run_with_the_cause(programs, tmp_path, tiny_run):
    with Hosts(2) as network, Cluster(programs, tmp_path, tiny_run, "2", "--set", "timeout=3") as cluster:
        first = start(cluster, network, 0)
        first.wait_for("this host leads")
        other = start(cluster, network, 1, fault="wait", who="1")
        cluster.wait_for("faulty")
        network.limit(1, 1e5)
        cluster.go()
        assert first.end() == 1, cluster.told
        assert other.end() == 1
        assert first.told.count("lost each other, and form a group again") == 1
        last = first.told.split("shoal: ")[-1]
        assert re.match(r"the ranks have lost each other twice after step \d+, without a step between", last)
        assert "waits at most timeout=3 s in a collective" in last
