"""Ranks that are lost under a backend that reports nothing, as NCCL: all processes start again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from elastic_stand_ins import FAULTS, STEPS
from hosts_stand_ins import Cluster, trained_on_one_host
from port_stand_ins import free_port

from shoal.launch.local import has_accelerators
from shoal.launch.submit import EXIT_STOPPED
from shoal.spec.run import Run

# Ranks get the backend with the fork; where there are accelerators they are started as programs.
pytestmark = pytest.mark.skipif(
    has_accelerators(),
    reason="ranks are not forked on this machine",
)

STAND_IN = Path(__file__).with_name("nccl_stand_ins.py")
MODULE = STAND_IN.stem


class Trained:
    """A finished `shoal train` whose ranks communicate through the stand-in."""

    def __init__(self, programs, folder, tiny_run, nproc, *words, fault="", who="1", **environment):
        (folder / "faults_at_home.py").write_text(FAULTS)
        shutil.copy(STAND_IN, folder)
        own = ["--set", f"steps={STEPS}", "--set", "optimizer.schedule=faults_at_home:begin", "--run", "one"]
        command = ["train", *tiny_run, "--set", "batch=6", *own, "--nproc", nproc, *words]
        around = {"FAULT": fault, "WHO": who, **environment}
        ended = programs.run(command, folder, around, module=MODULE)
        self.code, self.told = ended.returncode, ended.stderr
        run = Run.open(folder / "one")
        self.losses = {each["step"]: each["loss"] for each in run.metrics() if "loss" in each}
        self.events = run.members_file.read_text() if run.members_file.exists() else ""
        begun = [map(int, line.split()) for line in (folder / "processes").read_text().splitlines()]
        self.processes: dict[int, set[int]] = {}
        for member, process, _ in begun:
            self.processes.setdefault(member, set()).add(process)

    def require(self, unbroken, lost):
        """Checks that these members were lost, that all started again, and that the losses are as without."""
        assert self.code == 0, self.told
        # Sums over another number of ranks round differently.
        assert self.losses == pytest.approx(unbroken.losses, rel=1e-4)
        assert {member: f"rank {member} failed" in self.told for member in range(3)} == {
            member: member in lost for member in range(3)
        }
        assert all(len(processes) == 2 for processes in self.processes.values()), self.processes
        assert self.events.count('"lost"') == len(lost)


@pytest.fixture(scope="module")
def unbroken(programs, tmp_path_factory, tiny_run):
    trained = Trained(programs, tmp_path_factory.mktemp("unbroken"), tiny_run, "3:3")
    assert trained.code == 0, trained.told
    return trained


def test_garbage_of_a_collective_that_lost_a_rank_reaches_no_state_and_all_start_again(
    programs, tmp_path, tiny_run, unbroken
):
    """One restart suffices, and MIN ranks count as there while all start again."""
    words = ["2:3", "--restarts", "1"]
    broken = Trained(programs, tmp_path, tiny_run, *words, fault="kill", STAND_IN="garbage")
    broken.require(unbroken, lost={1})
    assert "rank 1 failed: killed by SIGKILL" in broken.told
    assert "now there are 3" in broken.told


def test_ranks_that_the_watchdog_aborts_after_another_was_lost_have_not_failed(
    programs, tmp_path, tiny_run, unbroken
):
    words = ["2:3", "--restarts", "1"]
    broken = Trained(programs, tmp_path, tiny_run, *words, fault="kill", who="2", STAND_IN_ABORT="0.005")
    broken.require(unbroken, lost={2})
    assert "watchdog thread terminated" in broken.told


def test_an_exception_of_one_rank_is_the_cause_though_its_group_reports_nothing(
    programs, tmp_path, tiny_run, unbroken
):
    broken = Trained(programs, tmp_path, tiny_run, "2:3", fault="exception", who="0")
    broken.require(unbroken, lost={0})
    assert "rank 0 failed: RuntimeError: a fault of this rank" in broken.told


def test_a_rank_that_ends_with_the_code_of_survivors_is_lost_like_any_other(
    programs, tmp_path, tiny_run, unbroken
):
    broken = Trained(programs, tmp_path, tiny_run, "2:3", fault="exit again", who="1")
    broken.require(unbroken, lost={1})
    assert "rank 1 failed: its process ended with exit code 76" in broken.told


@pytest.mark.long
@pytest.mark.parametrize("later", ["0.02", "0.06", "0.1", "0.5"])
def test_a_signal_after_a_loss_leaves_the_loss_as_the_cause(programs, tmp_path, tiny_run, later):
    """Over NCCL the others cannot save after it. Unless they begin to train again before the signal."""
    words = ["2:3", "--set", "checkpoint.every=2"]
    broken = Trained(programs, tmp_path, tiny_run, *words, fault="kill and stop", LATER=later)
    if broken.code != EXIT_STOPPED:
        assert broken.code == 1, broken.told
        assert "rank 1 failed: killed by SIGKILL" in broken.told.splitlines()[-3:][0], broken.told
        assert "continue with: shoal train --resume" in broken.told


@pytest.mark.long
@pytest.mark.parametrize("fault", ["sleep", "hold"])
def test_a_rank_that_hangs_is_named_by_those_whose_collectives_waited_for_it(
    programs, tmp_path, tiny_run, unbroken, fault
):
    words = ["2:3", "--set", "timeout=3", "--restarts", "1"]
    broken = Trained(programs, tmp_path, tiny_run, *words, fault=fault, who="2")
    broken.require(unbroken, lost={2})
    assert "rank 2 failed: its process did not come to the other ranks for 3 s" in broken.told


@pytest.mark.long
def test_a_rank_that_is_stopped_is_killed_and_all_start_again(programs, tmp_path, tiny_run, unbroken):
    broken = Trained(programs, tmp_path, tiny_run, "2:3", fault="stop", who="0")
    broken.require(unbroken, lost={0})
    assert "rank 0 failed: its process was stopped" in broken.told


@pytest.mark.long
def test_a_second_loss_while_the_others_start_again_is_survived(programs, tmp_path, tiny_run, unbroken):
    words = ["2:3", "--restarts", "2"]
    broken = Trained(programs, tmp_path, tiny_run, *words, fault="kill", who="1", STAND_IN_LOSES="2")
    broken.require(unbroken, lost={1, 2})


@pytest.mark.long
def test_the_others_go_on_without_a_rank_that_is_not_started_again(programs, tmp_path, tiny_run, unbroken):
    broken = Trained(programs, tmp_path, tiny_run, "2:3", "--restarts", "0", fault="kill", who="0")
    assert broken.code == 0, broken.told
    assert broken.losses == pytest.approx(unbroken.losses, rel=1e-4)
    assert {member: len(found) for member, found in broken.processes.items()} == {0: 1, 1: 2, 2: 2}


@pytest.mark.long
def test_too_few_ranks_end_the_run_with_the_rank_that_was_lost(programs, tmp_path, tiny_run):
    words = ["3:3", "--restarts", "0", "--set", "checkpoint.every=2"]
    broken = Trained(programs, tmp_path, tiny_run, *words, fault="kill", STAND_IN_ABORT="0.005")
    assert broken.code == 1
    assert "rank 1 failed: killed by SIGKILL" in broken.told.splitlines()[-3:][0]
    assert "continue with: shoal train --resume" in broken.told


@pytest.mark.long
@pytest.mark.parametrize("plan", ["shard=zero1", "shard=zero3"])
def test_a_sharded_state_comes_from_memory(programs, tmp_path, tiny_run, unbroken, plan):
    words = ["2:3", "--plan", plan, "--set", "checkpoint.memory=1"]
    broken = Trained(programs, tmp_path, tiny_run, *words, fault="kill", who="0", STAND_IN="garbage")
    broken.require(unbroken, lost={0})


@pytest.mark.long
def test_a_rank_that_leaves_starts_no_process_again(programs, tmp_path, tiny_run, unbroken):
    broken = Trained(programs, tmp_path, tiny_run, "2:3", fault="leave", who="2")
    assert broken.code == 0, broken.told
    assert broken.losses == pytest.approx(unbroken.losses, rel=1e-4)
    assert all(len(processes) == 1 for processes in broken.processes.values())


@pytest.mark.long
def test_hosts_start_their_ranks_again_when_a_rank_of_another_is_lost(programs, tmp_path, tiny_run):
    unbroken = trained_on_one_host(programs, tmp_path / "unbroken", tiny_run, 2)
    shutil.copy(STAND_IN, tmp_path)
    at = f"127.0.0.1:{free_port()}"
    around = {"PROGRAM": MODULE}
    with Cluster(programs, tmp_path, tiny_run, "2", "--restarts", "1") as cluster:
        first = cluster.start(at, **around)
        first.wait_for("this host leads")
        second = cluster.start(at, fault="kill", who="1", **around)
        cluster.go()
        assert first.end() == 0, cluster.told
        assert second.end() == 0, cluster.told
        assert cluster.losses == pytest.approx(unbroken, rel=1e-4), cluster.told
        assert "rank 1 failed on host 127.0.0.1" in first.told
        assert "rank 0 failed" not in first.told
        assert cluster.members.count('"lost"') == 1


@pytest.mark.long
def test_a_host_that_dies_is_replaced_while_the_others_start_again(programs, tmp_path, tiny_run):
    unbroken = trained_on_one_host(programs, tmp_path / "unbroken", tiny_run, 2)
    shutil.copy(STAND_IN, tmp_path)
    at = f"127.0.0.1:{free_port()}"
    around = {"PROGRAM": MODULE, "STAND_IN": "garbage"}
    with Cluster(programs, tmp_path, tiny_run, "1:2", "--plan", "shard=zero1") as cluster:
        first = cluster.start(at, **around)
        first.wait_for("this host leads")
        dies = cluster.start(at, fault="kill host", who="1", **around)
        first.wait_for("2 of 2 hosts")
        spare = cluster.start(at, **around)
        spare.wait_for("stands by")
        cluster.go()
        assert first.end() == 0, cluster.told
        assert dies.end() == -9
        assert spare.end() == 0, cluster.told
        assert cluster.losses == pytest.approx(unbroken, rel=1e-4), cluster.told
        assert "rank 1 failed: host 127.0.0.1" in first.told
