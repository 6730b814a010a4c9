"""Hosts that are lost and come while others train: `shoal train --nodes MIN:MAX`, with real launchers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import pytest
from hosts_stand_ins import FAULT, STEPS, Cluster, trained_on_one_host
from port_stand_ins import free_port

from shoal.cli.main import main
from shoal.launch.submit import EXIT_STOPPED


@pytest.fixture(scope="module")
def unbroken(programs, tmp_path_factory, tiny_run):
    return trained_on_one_host(programs, tmp_path_factory.mktemp("unbroken"), tiny_run, 2)


def require_equal(cluster, unbroken):
    # Sums over another number of ranks round differently.
    assert cluster.losses == pytest.approx(unbroken, rel=1e-4), cluster.told


def test_a_host_that_dies_is_replaced_by_a_spare_which_gets_the_state_from_a_peer(
    programs, tmp_path, tiny_run, unbroken
):
    at = f"127.0.0.1:{free_port()}"
    with Cluster(programs, tmp_path, tiny_run, "1:2", "--plan", "shard=zero1") as cluster:
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
        assert f"rank 1] step {STEPS - 1} begins" in first.told


def test_the_host_that_leads_tells_what_ranks_of_other_hosts_print_and_which_has_failed(
    programs, tmp_path, tiny_run
):
    at = f"127.0.0.1:{free_port()}"
    with Cluster(programs, tmp_path, tiny_run, "2", "--restarts", "0") as cluster:
        first = cluster.start(at)
        first.wait_for("this host leads")
        second = cluster.start(at, fault="print and fail", who="1")
        cluster.go()
        assert first.end() == 1, cluster.told
        assert second.end() == 1
        named = f"[{socket.gethostname()} rank 1] "
        told = [line.removeprefix(named) for line in first.told.splitlines() if line.startswith(named)]
        assert told[: FAULT + 1] == [f"step {step} begins" for step in range(FAULT + 1)]
        dropped = [int(line.split()[1].replace(",", "")) for line in told if line.startswith("... ")]
        kept = (cluster.run.path / "log" / "rank-00001.log").read_text().splitlines()[1:]  # after its heading
        assert dropped
        assert len(told) - len(dropped) + sum(dropped) == len(kept)
        failure = "shoal: rank 1 failed on host 127.0.0.1"
        assert [line for line in first.told.splitlines() if "failed" in line][-1].startswith(failure)
        assert "ValueError: enough is said" in second.told


@pytest.mark.long
@pytest.mark.parametrize("plan", ["shard=none", "shard=zero3"])
def test_a_host_whose_rank_is_drained_hands_over_its_state(programs, tmp_path, tiny_run, unbroken, plan):
    at = f"127.0.0.1:{free_port()}"
    with Cluster(programs, tmp_path, tiny_run, "1:2", "--plan", plan) as cluster:
        first = cluster.start(at, HOLD='"asked"')
        first.wait_for("this host leads")
        second = cluster.start(at, fault="wait", who="1", HOLD='"asked"')
        cluster.wait_for("faulty")
        cluster.go()
        assert main(["drain", str(cluster.folder / "one"), "1"]) == 0
        assert first.end() == 0, cluster.told
        assert second.end() == 0, cluster.told
        require_equal(cluster, unbroken)
        assert '"left"' in cluster.members
        assert '"lost"' not in cluster.members
        assert "shoal: `shoal drain` asks rank 1 to leave\n" in first.told


@pytest.mark.long
def test_a_host_whose_launcher_is_told_to_end_leaves_and_the_others_go_on(
    programs, tmp_path, tiny_run, unbroken
):
    at = f"127.0.0.1:{free_port()}"
    with Cluster(programs, tmp_path, tiny_run, "1:2", "--plan", "shard=zero1") as cluster:
        first = cluster.start(at, HOLD='"left"')
        first.wait_for("this host leads")
        leaves = cluster.start(at, fault="leave host", who="1")
        cluster.go()
        assert leaves.end() == EXIT_STOPPED, cluster.told
        assert first.end() == 0, cluster.told
        require_equal(cluster, unbroken)
        assert '"lost"' not in cluster.members


@pytest.mark.long
def test_a_run_that_has_lost_a_host_keeps_its_last_rank_and_can_be_stopped(programs, tmp_path, tiny_run):
    at = f"127.0.0.1:{free_port()}"
    with Cluster(programs, tmp_path, tiny_run, "1:2") as cluster:
        first = cluster.start(at, HOLD='"asked"')
        first.wait_for("this host leads")
        cluster.start(at, fault="kill host", who="1")
        cluster.wait_for("faulty")
        cluster.go()
        cluster.wait_for("held")
        assert main(["drain", str(cluster.folder / "one"), "0"]) == 2
        os.kill(first.process.pid, signal.SIGTERM)
        assert first.end() == EXIT_STOPPED, cluster.told
        assert "stopped by a signal; saved" in first.told


@pytest.mark.long
def test_a_host_that_leads_and_is_started_again_goes_on_from_the_memory_of_the_others(
    programs, tmp_path, tiny_run, unbroken
):
    at = f"127.0.0.1:{free_port()}"
    words = ["--plan", "shard=zero1", "--set", "checkpoint.memory=1"]
    with Cluster(programs, tmp_path, tiny_run, "1:2", *words) as cluster:
        first = cluster.start(at, fault="kill host", who="0")
        first.wait_for("this host leads")
        second = cluster.start(at)
        cluster.wait_for("faulty")
        cluster.go()
        assert first.end() == -9
        second.wait_for("the launcher of the host that leads has ended; the ranks here are ended")
        again = cluster.start(at, "--resume", "auto")
        assert again.end() == 0, cluster.told
        assert second.end() == 0, cluster.told
        assert "goes on from /dev/shm/" in again.told
        require_equal(cluster, unbroken)


@pytest.mark.long
def test_without_the_host_that_leads_the_run_ends_with_the_cause(programs, tmp_path, tiny_run):
    at = f"127.0.0.1:{free_port()}"
    with Cluster(programs, tmp_path, tiny_run, "1:2") as cluster:
        first = cluster.start(at, fault="kill host", who="0")
        first.wait_for("this host leads")
        second = cluster.start(at)
        cluster.wait_for("faulty")
        cluster.go()
        assert first.end() == -9
        second.wait_for("the ranks here are ended")
        os.kill(second.process.pid, signal.SIGTERM)
        assert second.end() == 1
        assert "is gone: the launcher of the host that leads has ended" in second.told
        assert "--resume auto" in second.told


OLDER = """
import sys
import shoal.launch.hosts.follower
sys.modules["shoal.launch.hosts.follower"].release = lambda: "0.0.9"
from shoal.cli.main import main
sys.exit(main())
"""


def test_who_cannot_train_with_the_others_is_told_why_and_who_lacks_the_token_waits(
    programs, tmp_path, tiny_run, unbroken
):
    at = f"127.0.0.1:{free_port()}"
    (tmp_path / "older_at_home.py").write_text(OLDER)
    with Cluster(programs, tmp_path, tiny_run, "2") as cluster:
        first = cluster.start(at)
        first.wait_for("this host leads")
        token = tmp_path / "not there yet"
        second = cluster.start(at, SHOAL_TOKEN_FILE=str(token))
        second.wait_for(f"waits for the host that leads, at {at}, up to 300 s: there is no {token}")
        other_run = cluster.start(at, "--run", str(tmp_path / "two"))
        assert other_run.end() == 2
        assert (
            f"it was started for the run {tmp_path / 'two'}, and the host that leads trains" in other_run.told
        )
        older = cluster.start(at, PROGRAM="older_at_home")
        assert older.end() == 2
        assert "it has Shoal 0.0.9, and the host that leads has" in older.told
        other_plan = cluster.start(at, "--plan", "shard=zero3", "--set", "batch=4")
        assert other_plan.end() == 2
        assert 'it was given plan="shard=zero3", and the host that leads' in other_plan.told
        assert first.told.count("is refused") == 3
        assert not (tmp_path / "two").exists()
        token.symlink_to(tmp_path / "token")
        cluster.go()
        assert first.end() == second.end() == 0, cluster.told
        require_equal(cluster, unbroken)


@contextlib.contextmanager
def without_second_host(programs, tmp_path, tiny_run, plan):
    """The cluster after its second host was killed, and the losses of one host that trained with the Plan."""
    at = f"127.0.0.1:{free_port()}"
    unbroken = trained_on_one_host(programs, tmp_path / "unbroken", tiny_run, 4, "--plan", plan)
    words = ["--plan", plan, "--set", "checkpoint.memory=1"]
    with Cluster(programs, tmp_path, tiny_run, "1:2", *words, ranks=2) as cluster:
        first = cluster.start(at)
        first.wait_for("this host leads")
        cluster.start(at, fault="kill host", who="2")
        cluster.wait_for("faulty")
        cluster.go()
        assert first.end() == 0, cluster.told
        yield cluster, unbroken


@pytest.mark.long
@pytest.mark.parametrize("plan", ["shard=zero3", "dp=2,tp=2", "dp=2,pp=2"])
def test_any_plan_goes_on_without_a_host(programs, tmp_path, tiny_run, plan):
    with without_second_host(programs, tmp_path, tiny_run, plan) as (cluster, unbroken):
        require_equal(cluster, unbroken)


@pytest.mark.long
def test_local_updates_go_on_without_a_host(programs, tmp_path, tiny_run):
    plan = "exchange=local,every=2"
    with without_second_host(programs, tmp_path, tiny_run, plan) as (cluster, unbroken):
        assert cluster.losses.keys() == unbroken.keys()
        # Half as many workers make other steps between two merges: a twentieth is wider than they differ.
        assert cluster.losses[12] == pytest.approx(unbroken[12], rel=0.05)


@pytest.mark.parametrize("at", ["localhost:0", "0.0.0.0:0", "[::]:0"])
def test_hosts_of_one_machine_do_not_meet_at_what_each_host_takes_for_itself(
    tmp_path, tiny_run, monkeypatch, capsys, at
):
    monkeypatch.setenv("SHOAL_HOST_ID", "one")
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(tmp_path / "token"))
    words = ["--run", str(tmp_path / "one"), "--nodes", "1:2", "--nproc", "2", "--rendezvous", at]
    assert main(["train", *tiny_run, *words]) == 2
    assert "lead a run of its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "0:2", "--rendezvous", "127.0.0.1:0"], "--nodes 0:2 is no number of hosts"),
        (["--nodes", "2"], "nothing says where the hosts meet"),
        (["--nodes", "2", "--rendezvous", "127.0.0.1"], "is no address with a port"),
        (["--nodes", "1", "--rendezvous", "127.0.0.1:0", "--plan", "exchange=server"], "parameter servers"),
        *(
            (["--nodes", nodes, "--rendezvous", f"{at}:0"], "lead a run of its own")
            for nodes in ("2", "1:2")
            for at in ("localhost", "127.0.0.1", "127.8.7.6", "[::1]", "0.0.0.0", "[::]")
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path, tiny_run, monkeypatch, capsys, words, told
):
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("SHOAL_HOST_ID", raising=False)
    assert main(["train", *tiny_run, "--run", str(tmp_path / "one"), "--nproc", "2", *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "one").exists()
