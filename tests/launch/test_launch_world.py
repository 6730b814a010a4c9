"""What launchers say of a process in its environment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import CommunicationError, ConfigError
from shoal.launch.local import World, find_world, join
from shoal.launch.local.world import _first_host
from shoal.testing import run_ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
ACCELERATE = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "FORK_LAUNCHED": "0"}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[001-004]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NODELIST": "node[001-004]",
}


@pytest.mark.parametrize("environment", [TORCHRUN, ACCELERATE])
def test_the_environment_of_torchrun_and_accelerate_is_read(environment):
    assert find_world(environment) == World(rank=3, ranks=8, local_rank=1, master=("node1", 29500))


def test_the_environment_of_srun_gives_a_meeting_point_that_all_tasks_agree_on():
    world = find_world(SRUN)
    assert (world.rank, world.ranks, world.local_rank) == (3, 8, 1)
    host, port = world.master
    assert host == "node001"
    assert 1024 < port < 65536
    other = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert find_world(other).master == world.master


def test_a_meeting_point_that_is_given_wins_under_srun():
    assert find_world({**SRUN, "MASTER_ADDR": "10.0.0.1"}).master[0] == "10.0.0.1"
    assert find_world({**SRUN, "MASTER_PORT": "4000"}).master[1] == 4000
    assert find_world({**SRUN, "MASTER_ADDR": "", "MASTER_PORT": ""}).master == find_world(SRUN).master


def test_torchrun_within_a_slurm_job_is_torchrun():
    assert find_world({**SRUN, **TORCHRUN}).master == ("node1", 29500)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin"},
        # a batch script or an allocation, in which srun did not start this process
        {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODELIST")},
    ],
)
def test_without_a_launcher_there_is_no_world(environment):
    assert find_world(environment) is None


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_torchrun_should_have_set_is_named(missing):
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigError, match=f"no {missing}") as caught:
        find_world(environment)
    assert missing in caught.value.change


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"])
def test_a_variable_that_srun_should_have_set_is_named(missing):
    with pytest.raises(ConfigError, match=f"no {missing}"):
        find_world({name: value for name, value in SRUN.items() if name != missing})


@pytest.mark.parametrize(
    ("environment", "name", "value"),
    [
        (environment, name, value)
        for environment, names in (
            (TORCHRUN, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
            (SRUN, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "MASTER_PORT", "SLURM_JOB_ID")),
        )
        for name in names
        for value in ("many", "-1", "1.5", "²", " ")
    ],
)
def test_a_variable_that_is_not_a_number_is_named(environment, name, value):
    with pytest.raises(ConfigError, match=f"{name}=.* is not a number"):
        find_world({**environment, name: value})


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN])
@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_that_no_rank_can_connect_to_is_refused(environment, port):
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port} .* is no port that ranks can meet at"):
        find_world({**environment, "MASTER_PORT": port})
    ranks, rank = (
        ("WORLD_SIZE", "RANK") if "RANK" in environment else ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    )
    assert find_world({**environment, ranks: "1", rank: "0", "MASTER_PORT": port}).ranks == 1


@pytest.mark.parametrize("change", [{"RANK": "8"}, {"WORLD_SIZE": "0"}, {"RANK": "0", "WORLD_SIZE": "0"}])
def test_a_rank_beyond_the_number_of_ranks_is_refused(change):
    with pytest.raises(ConfigError, match="says that this is rank"):
        find_world({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-4]", "node1"),
        ("node[003-007,12]", "node003"),
        ("node[12,003-007],login1", "node12"),
        ("node[01-02]-ib0,node9", "node01-ib0"),
        ("rack[0-1]node[3-4],x", "rack0node3"),
        ("gpu-a.example.org,gpu-b.example.org", "gpu-a.example.org"),
        ("10-0-0-1,10-0-0-2", "10-0-0-1"),
    ],
)
def test_the_first_of_slurms_hosts_is_where_ranks_meet(hosts, first):
    assert find_world({**SRUN, "SLURM_STEP_NODELIST": hosts}).master[0] == first


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z]", fullmatch=True)


@given(NAMES, st.lists(st.integers(0, 999), min_size=1, max_size=4), st.integers(1, 4), st.lists(NAMES))
def test_the_first_host_of_any_list_is_its_prefix_with_its_first_number(prefix, numbers, width, others):
    text = [f"{number:0{width}d}" for number in numbers]
    assert _first_host(",".join([f"{prefix}[{','.join(text)}]", *others])) == prefix + text[0]


@pytest.mark.parametrize("hosts", ["", ",", "[]"])
def test_a_list_without_a_host_is_refused(hosts):
    with pytest.raises(ConfigError, match="names no host"):
        find_world({**SRUN, "SLURM_STEP_NODELIST": hosts})


def test_one_rank_forms_no_group():
    environment = {}
    join(
        World(rank=0, ranks=1, local_rank=0, master=("", 0)),
        torch.device("cpu"),
        timeout=1,
        environment=environment,
    )
    assert environment == {}
    assert not torch.distributed.is_initialized()


def join_alone():
    world = World(rank=1, ranks=2, local_rank=1, master=("127.0.0.1", 9))  # nobody listens there
    try:
        join(world, torch.device("cpu"), timeout=1)
    except CommunicationError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_meet_are_told_where_they_tried():
    # In a process of its own, since torch counts a group that failed to form.
    assert "2 ranks did not meet at 127.0.0.1:9" in run_ranks(join_alone, 1)[0]
