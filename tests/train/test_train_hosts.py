"""Hosts that are lost and come while others train: `shoal train --nodes MIN:MAX`, with real launchers."""

from __future__ import annotations

import pytest
from hosts_stand_ins import Cluster, free_port, trained_on_one_host


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, tiny_run):
    return trained_on_one_host(tmp_path_factory.mktemp("unbroken"), tiny_run, 2)


def require_equal(cluster, unbroken):
    # Sums over another number of ranks round differently.
    assert cluster.losses == pytest.approx(unbroken, rel=1e-4), cluster.told


def test_a_host_that_dies_is_replaced_by_a_spare_which_gets_the_state_from_a_peer(
    tmp_path, tiny_run, unbroken
):
    at = f"127.0.0.1:{free_port()}"
    with Cluster(tmp_path, tiny_run, "1:2", "--plan", "shard=zero1") as cluster:
        first = cluster.start(at, HOLD='"came"')
        first.wait_for("this host leads")
        dies = cluster.start(at, fault="kill host", who="1")
        first.wait_for("2 of 2 hosts")
        spare = cluster.start(at)
        spare.wait_for("stands by")
        cluster.go()
        assert first.end() == 0, cluster.told
        assert dies.end() == -9
        assert spare.end() == 0, cluster.told
        require_equal(cluster, unbroken)
        assert "rank 1 failed: host 127.0.0.1" in first.told
        assert "ended" in first.told
        assert "this host stands by" in spare.told
        assert "this host has ranks 1 to 1" in spare.told
        assert cluster.members.count('"lost"') == cluster.members.count('"came"') == 1
