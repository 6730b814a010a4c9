"""Ranks that are lost while others train: `shoal train --nproc MIN:MAX`, with real processes and faults."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from elastic_stand_ins import FAULT, FAULTS, STEPS
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from shoal.errors import PlanError
from shoal.launch.elastic import Generation, Membership
from shoal.launch.submit import EXIT_STOPPED
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.run import Run
from shoal.train import Job, TrainConfig, elastic
from shoal.train.elastic import _leave, _plan_in, group_failure, plan_for


class Trained:
    """A finished `shoal train`."""

    def __init__(self, folder: Path, tiny_run, *words: str, fault: str = "", who: str = "1") -> None:
        (folder / "faults_at_home.py").write_text(FAULTS)
        program = (
            "import os, sys; os.environ['LAUNCHED_BY'] = str(os.getpid()); "
            "from shoal.cli.main import main; sys.exit(main())"
        )
        own = ["--set", f"steps={STEPS}", "--set", "optimizer.schedule=faults_at_home:begin", "--run", "one"]
        with subprocess.Popen(
            [sys.executable, "-c", program, "train", *tiny_run, *own, *words],
            cwd=folder,
            env={**os.environ, "FAULT": fault, "WHO": who, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            _, self.told = process.communicate(timeout=500)
        self.code = process.returncode
        self.left_in_memory = list(Path("/dev/shm").glob(f"shoal-members-{process.pid}-*"))
        self.losses = {}
        if (folder / "one" / "run.json").exists():
            self.losses = {
                each["step"]: each["loss"] for each in Run.open(folder / "one").metrics() if "loss" in each
            }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, tiny_run):
    return Trained(tmp_path_factory.mktemp("unbroken"), tiny_run, "--nproc", "2")


def require_equal(broken, unbroken):
    assert broken.code == 0, broken.told
    # Sums over another number of ranks round differently.
    assert broken.losses == pytest.approx(unbroken.losses, rel=1e-4)


def test_a_killed_rank_costs_no_step_and_is_replaced(tmp_path, tiny_run, unbroken):
    broken = Trained(tmp_path, tiny_run, "--nproc", "1:2", fault="kill")
    require_equal(broken, unbroken)
    assert "rank 1 failed: killed by SIGKILL" in broken.told
    assert "rank 1 is there again; now there are 2" in broken.told
    assert f"step-{FAULT:08d}" in broken.told.partition("goes on from ")[2].splitlines()[0]
    assert not broken.left_in_memory


@pytest.mark.long
@pytest.mark.parametrize("who", ["0", "1"])
@pytest.mark.parametrize("fault", ["kill", "segfault", "exit", "exception", "stop", "leave"])
def test_any_end_of_a_rank_is_survived(tmp_path, tiny_run, unbroken, fault, who):
    broken = Trained(tmp_path, tiny_run, "--nproc", "1:2", fault=fault, who=who)
    require_equal(broken, unbroken)


@pytest.mark.long
@pytest.mark.parametrize("who", ["0", "1"])
@pytest.mark.parametrize(
    ("fault", "cause"), [("sleep", "faults_at_home.py"), ("hold", "holds the interpreter's lock")]
)
def test_a_rank_that_hangs_is_named_and_replaced(tmp_path, tiny_run, unbroken, fault, cause, who):
    words = ["--set", "checkpoint.memory=1", "--set", "timeout=3"]
    broken = Trained(tmp_path, tiny_run, "--nproc", "1:2", *words, fault=fault, who=who)
    require_equal(broken, unbroken)
    told = next(line for line in broken.told.splitlines() if line.startswith(f"shoal: rank {who} failed"))
    assert "did not come to the other ranks" in told
    assert cause in told


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    ["shard=zero1", "shard=zero3", "dp=2,tp=2", "dp=2,pp=2", "dp=4,replicate=2,shard=zero3", "tp=2,pp=2"],
)
def test_any_plan_goes_on_with_the_ranks_that_are_left(tmp_path, tiny_run, unbroken, plan):
    words = ["--nproc", "2:4", "--plan", plan, "--set", "checkpoint.memory=1"]
    broken = Trained(tmp_path, tiny_run, *words, fault="kill", who="2")
    require_equal(broken, unbroken)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "leave"])
@pytest.mark.parametrize("exchange", ["every=4,delay=2", "every=4,fragments=2,delay=1,compress=int8"])
def test_workers_whose_merges_take_steps_go_on_without_one_that_is_lost(tmp_path, tiny_run, exchange, fault):
    words = ["--nproc", "1:2", "--plan", f"dp=2,exchange=local,{exchange}", "--set", "checkpoint.memory=1"]
    broken = Trained(tmp_path, tiny_run, *words, fault=fault)
    assert broken.code == 0, broken.told
    assert sorted(broken.losses) == list(range(1, STEPS + 1))
    assert broken.losses[STEPS] < broken.losses[1]


@pytest.mark.long
def test_too_few_ranks_end_the_run_with_the_cause_and_the_way_to_go_on(tmp_path, tiny_run):
    words = ["--nproc", "2:2", "--set", "checkpoint.every=2"]
    broken = Trained(tmp_path, tiny_run, *words, "--restarts", "0", fault="kill")
    assert broken.code == 1
    assert "rank 1 failed: killed by SIGKILL" in broken.told
    assert "continue with: shoal train --resume" in broken.told
    assert not broken.left_in_memory


@pytest.mark.long
def test_a_rank_that_fails_again_and_again_is_left_out(tmp_path, tiny_run, unbroken):
    broken = Trained(tmp_path, tiny_run, "--nproc", "1:2", fault="always")
    require_equal(broken, unbroken)
    assert broken.told.count("rank 1 failed") == 2


@pytest.mark.long
def test_a_signal_to_the_launcher_stops_all_after_they_have_saved(tmp_path, tiny_run):
    broken = Trained(tmp_path, tiny_run, "--nproc", "1:2", fault="stop all")
    assert broken.code == EXIT_STOPPED, broken.told
    assert "stopped by a signal; saved" in broken.told


@pytest.mark.parametrize("later", ["0.15", pytest.param("0.3", marks=pytest.mark.long)])
def test_a_signal_while_a_rank_starts_again_stops_the_others_after_they_have_saved(
    tmp_path, tiny_run, monkeypatch, later
):
    monkeypatch.setenv("LATER", later)
    broken = Trained(tmp_path, tiny_run, "--nproc", "1:3", "--set", "batch=6", fault="kill and stop")
    assert broken.code == EXIT_STOPPED, broken.told
    assert "stopped by a signal; saved" in broken.told


def test_a_rank_that_leaves_its_group_gives_back_device_memory_that_torch_keeps(monkeypatch):
    """The next Plan's tensors have other sizes."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    store = HashStore()
    membership = Membership(0, lambda: store, -1, lambda: None)
    membership.begin("cpu:gloo,cuda:nccl")
    _leave(None, membership)
    assert emptied
    assert not membership.starts_again


def test_the_failure_of_a_group_is_read_from_the_backends_that_know_of_it(monkeypatch):
    errors = iter(["SUCCESS", "TIMEOUT"])
    nccl = SimpleNamespace(get_error=lambda: SimpleNamespace(name=next(errors)))
    backends = {"cpu": SimpleNamespace(), "cuda": nccl}
    group = SimpleNamespace(
        _device_types=[torch.device("cpu"), torch.device("cuda")],
        _get_backend=lambda device: backends[device.type],
    )

    def gone(device):
        raise RuntimeError("the group has ended")

    ended = SimpleNamespace(_device_types=[torch.device("cuda")], _get_backend=gone)
    monkeypatch.setattr(elastic, "_world", SimpleNamespace(pg_map=[ended, group]))
    assert group_failure() == ""
    assert group_failure() == "TIMEOUT"


def job(plan, batch, **changes):
    settled = SettledPlan.of(Plan.parse(plan), batch)
    config = TrainConfig(batch=batch, **changes.pop("config", {}))
    return Job(config=config, plan=settled, path=Path("none"), resume=None, **changes)


@pytest.mark.parametrize(
    ("plan", "batch", "members", "expected"),
    [
        ("dp=4", 16, 2, "dp=2,microbatch=4"),
        ("dp=4", 16, 3, "dp=3,microbatch=2,shares=3x2-2"),
        ("dp=4,shard=zero3", 16, 3, "dp=3,shard=zero3,microbatch=2,shares=3x2-2"),
        ("dp=4,tp=2", 16, 6, "dp=3,tp=2,microbatch=2,shares=3x2-2"),
        ("dp=4,replicate=2,shard=zero3", 16, 2, "dp=2,shard=zero3,microbatch=4"),
        ("dp=8,replicate=2,shard=zero3", 16, 4, "dp=4,shard=zero3,microbatch=2"),
        ("dp=4,exchange=local,every=2", 16, 3, "dp=2,microbatch=4,exchange=local,every=2"),
        ("dp=4,ep=2", 16, 3, "dp=2,ep=2,microbatch=4"),
    ],
)
def test_fewer_members_train_fewer_replicas_of_the_same_layout(plan, batch, members, expected):
    assert str(plan_for(job(plan, batch), members)) == expected


@given(dp=st.integers(2, 40), lost=st.integers(1, 39), size=st.integers(1, 8), count=st.integers(1, 4))
def test_no_rank_has_more_samples_than_with_a_number_of_replicas_that_divides_the_batch(
    dp, lost, size, count
):
    batch, members = dp * size * count, max(1, dp - lost)
    plan = plan_for(job(f"dp={dp},shard=zero3,microbatch={size}", batch), members)
    assert SettledPlan.of(plan, batch) == plan
    assert plan.ranks <= members
    dividing = max(each for each in range(1, members + 1) if batch // size % each == 0)
    assert plan.microbatches_of(batch) * plan.microbatch <= batch // dividing


@pytest.mark.parametrize("plan", ["tp=2,pp=2", "pp=4", "dp=2,pp=2", "dp=2,tp=2,shard=zero1", "dp=2,cp=2"])
def test_what_a_lost_rank_did_goes_to_all_others_where_that_is_quicker(plan):
    machines = {"cluster": Cluster.preset("dgx-h100").with_devices(4), "config": {"model": "1b"}}
    assert plan_for(job(plan, 24, **machines), 3).ranks == 3


def test_a_model_with_routers_is_not_padded():
    experts = {"config": {"model": "tiny-experts"}}
    assert plan_for(job("dp=4,shard=zero3", 16, **experts), 3).dp == 2
    assert plan_for(job("dp=4", 16, **experts), 3).dp == 3


def test_without_a_whole_replica_and_without_predictions_there_are_fewer_stages():
    unknown = {"config": {"model": "nowhere:model"}}
    assert str(plan_for(job("pp=4,split=1-1-1-1,microbatch=1", 16, **unknown), 3)) == "dp=1,pp=3,microbatch=1"


def test_local_updates_are_not_given_up_for_a_quicker_plan():
    machines = {"cluster": Cluster.preset("dgx-h100").with_devices(8), "config": {"model": "1b"}}
    assert plan_for(job("dp=4,tp=2,exchange=local,every=4", 24, **machines), 7).exchange == "local"


def test_a_replica_that_has_both_cores_is_not_cut_over_more_ranks():
    cores = Cluster.preset("laptop").with_cores(2).with_devices(4)
    assert plan_for(job("dp=2,pp=2", 16, cluster=cores), 3).ranks == 2


def test_a_plan_that_is_chosen_anew_keeps_the_precision():
    machines = {"cluster": Cluster.preset("dgx-h100").with_devices(4), "config": {"model": "1b"}}
    assert plan_for(job("tp=4,precision=fp32", 24, **machines), 3).precision == "fp32"


class OneMember:
    """What `_plan_in` asks of a Membership."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.is_due = False


@pytest.mark.parametrize("due", [None, 0, 1, 2])
def test_all_members_go_on_with_one_plan_or_all_go_to_the_newer_generation(monkeypatch, due):
    """The first member chooses slowly, and meanwhile one learns that there is a newer generation."""
    given, store, found = job("dp=4", 16), HashStore(), {}
    members = [OneMember(number) for number in range(3)]

    def slow(job: Job, count: int) -> Plan:
        if due is not None:
            members[due].is_due = True
        while due in (1, 2) and not store.check(["plan of 5"]):  # the member that is due decides first
            time.sleep(0.01)
        return plan_for(job, count)

    monkeypatch.setattr("shoal.train.elastic.plan_for", slow)
    generation = Generation(5, (0, 1, 2))

    def choose(each: OneMember) -> None:
        found[each.member] = _plan_in(generation, given, each, store)

    threads = [threading.Thread(target=choose, args=[each]) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The first one goes on, with all others, though it is due: the next generation comes after a step.
    expected = None if due in (1, 2) else plan_for(given, 3)
    assert found == dict.fromkeys(range(3), expected)


def test_members_learn_that_the_first_one_has_no_plan(monkeypatch):
    def none(job: Job, count: int) -> Plan:
        raise PlanError("there is none", possible="nothing", change="nothing")

    monkeypatch.setattr("shoal.train.elastic.plan_for", none)
    given, store, generation = job("dp=4", 16), HashStore(), Generation(5, (0, 1, 2))
    with pytest.raises(PlanError):
        _plan_in(generation, given, OneMember(0), store)
    assert _plan_in(generation, given, OneMember(1), store) is None
