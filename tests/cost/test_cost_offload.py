"""What it takes to keep state outside of devices, against the formulas above the code."""

import dataclasses

import pytest

from shoal.cluster import Cluster, Host
from shoal.cost import Offload
from shoal.cost.memory.memory import memory_of
from shoal.cost.time.step import Costs
from shoal.errors import ClusterError, ConfigError, PlanError
from shoal.plan import SettledPlan
from shoal.workload import shape, workload_of

WORKLOAD = workload_of(shape("llama3-8b"))
HOST = Host(name="h", devices=8, memory=2e12, bandwidth=4e11, share=0.5, file_bandwidth=8e9)
BATCH = 32
ZERO3 = SettledPlan(dp=8, shard="zero3", microbatch=1, precision="bf16")
OWNED = WORKLOAD.parameters / 8


def machine(link=5e10, host=HOST):
    cluster = Cluster.preset("dgx-h100", 8)
    return cluster.replace(host=host, device=dataclasses.replace(cluster.device, host_bandwidth=link))


def offload(plan=ZERO3, cluster=None, **fields):
    return Offload.of(Costs(WORKLOAD, cluster or machine()), plan, BATCH, **fields)


def test_an_update_on_the_host_takes_its_share_of_the_memory_s_rate_or_of_the_link():
    memory = 4e11 * 0.5 / 8
    assert offload().parts["update"] == pytest.approx(30 * OWNED / memory)
    slow = offload(cluster=machine(link=1e8))
    assert slow.parts["update"] == pytest.approx(2 * OWNED / 1e8)


def test_gradients_go_beside_the_last_backward_as_far_as_that_is_long():
    assert offload().parts["gradients"] == 0
    cluster = machine(link=1e8)
    (stage,) = Costs(WORKLOAD, cluster).stages(ZERO3, 4)
    exposed = offload(cluster=cluster).parts["gradients"]
    assert exposed == pytest.approx(4 * OWNED / 1e8 - stage.input - stage.weight)


def test_state_in_files_is_read_and_written_once_in_a_step():
    found = offload(to="file")
    assert found.file_bytes == pytest.approx(2 * 12 * OWNED)  # moments and the fp32 weight
    assert found.parts["update"] == pytest.approx(found.file_bytes / 1e9)


def test_weights_in_the_host_s_memory_come_twice_for_each_micro_batch():
    found = offload(what="parameters")
    micro_batches = BATCH / 8
    assert found.link_bytes == pytest.approx((4 + 2 * micro_batches * 2) * OWNED)
    assert found.host_bytes == pytest.approx(8 * (12 + 2) * OWNED)


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3", "zero3-once"])
def test_the_device_is_left_with_what_still_computes(shard):
    plan = ZERO3.replace(shard=shard)
    (memory,) = memory_of(WORKLOAD, plan, BATCH)
    left = memory.states - offload(plan).freed(memory) - memory.parts["gradients"]
    shards = 8 if shard.startswith("zero3") else 1
    assert left == pytest.approx(2 * WORKLOAD.parameters / shards)  # weights of 16 bit
    if shard.startswith("zero3"):
        assert offload(plan, what="parameters").freed(memory) == pytest.approx(
            memory.parts["optimizer"] + memory.parts["weights"]
        )


def test_a_step_is_longer_by_what_is_exposed_less_the_passes_on_the_device():
    found = offload(what="parameters", to="file")
    costs = Costs(WORKLOAD, machine())
    assert found.extra == pytest.approx(sum(found.parts.values()) - costs.update_of(ZERO3, 4))
    assert set(found.parts) == {"gradients", "update", "weights"}


def test_devices_that_have_a_host_alone_get_all_of_it():
    alone = offload(cluster=machine(host=dataclasses.replace(HOST, devices=1)))
    assert alone.parts["update"] == pytest.approx(offload().parts["update"] / 8)


def test_what_cannot_be_offloaded_is_refused():
    with pytest.raises(PlanError, match="shard=zero1"):
        offload(ZERO3.replace(shard="zero1"), what="parameters")
    with pytest.raises(ConfigError, match="optimiser"):
        offload(what="optimiser")
    with pytest.raises(ConfigError, match="to=disk"):
        offload(to="disk")
    with pytest.raises(ClusterError, match="host_bandwidth"):
        offload(cluster=machine(link=0.0))
    with pytest.raises(ClusterError, match="file_bandwidth"):
        offload(cluster=machine(host=dataclasses.replace(HOST, file_bandwidth=0.0)), to="file")
    with pytest.raises(ClusterError, match="on each host"):
        offload(cluster=machine(host=dataclasses.replace(HOST, memory=1e9)))


def test_presets_of_accelerators_know_their_hosts_and_files_keep_them(tmp_path):
    cluster = Cluster.preset("dgx-h100", 16)
    assert cluster.host.bandwidth > 0
    assert Cluster.preset("dgx-2").host.devices == 16
    cluster.write(tmp_path / "cluster.toml")
    assert Cluster.read(tmp_path / "cluster.toml") == cluster
