"""What it takes to keep state outside of devices, against the formulas above the code."""

import dataclasses

import pytest

from shoal.errors import ClusterError
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory import by_piece
from shoal.predict.cost.memory.activations import kept_bytes
from shoal.predict.cost.memory.memory import Memories, memory_of
from shoal.predict.cost.time.offload import MOVED_RATE, staging_bytes
from shoal.predict.cost.time.step import Costs
from shoal.spec.cluster import Cluster, Host
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import ModelShape, shape, workload_of

WORKLOAD = workload_of(shape("llama3-8b"))
HOST = Host(name="h", devices=8, memory=2e12, bandwidth=4e11, share=0.5, file_bandwidth=8e9)
SMALL = ModelShape(layers=8, hidden=64, ffn=64, heads=4, vocab=128, seq=8)
COUNT = 4
BATCH = 8 * COUNT
ZERO3 = SettledPlan(dp=8, shard="zero3", microbatch=1, precision="bf16")
STATE, ALL = "optimizer:file", "optimizer:file+gradients:file+parameters:file"
OWNED = WORKLOAD.parameters / 8


def machine(link=5e10, host=HOST):
    cluster = Cluster.preset("dgx-h100", 8)
    return cluster.replace(host=host, device=dataclasses.replace(cluster.device, host_bandwidth=link))


def costs_of(cluster=None):
    return Costs(WORKLOAD, cluster or machine())


def offload(places, cluster=None, plan=ZERO3):
    return costs_of(cluster).offload(plan.replace(offload=places), 0, COUNT)


def test_an_update_on_the_host_passes_its_memory_and_goes_down_and_up_the_link():
    found = offload("optimizer:host")
    memory = 4e11 * 0.5 / 8
    assert found.parts["update"] == pytest.approx(28 * OWNED / memory + 12 * OWNED / 5e10)
    assert found.file_bytes == 0
    assert found.host_bytes == pytest.approx(8 * 8 * OWNED)


def test_moments_in_files_are_read_and_written_once_in_a_step_beside_the_update():
    found = offload(STATE)
    assert found.file_bytes == pytest.approx(16 * OWNED)
    assert found.parts["update"] == pytest.approx(16 * OWNED / 1e9)
    quick = offload(STATE, machine(host=dataclasses.replace(HOST, file_bandwidth=1e15)))
    assert quick.parts["update"] == pytest.approx(offload("optimizer:host").parts["update"])


def test_parameters_and_gradients_in_files_are_hidden_as_far_as_passes_are_long():
    (stage,) = costs_of().stages(ZERO3, COUNT)
    forward, backward = stage.forward, stage.input + stage.weight
    found = offload(ALL)
    second = OWNED / 1e9
    assert found.parts["forward"] == pytest.approx(COUNT * max(0, 4 * second - forward))
    assert found.parts["backward"] == pytest.approx(
        max(0, 8 * second - backward) + (COUNT - 1) * max(0, 12 * second - backward)
    )
    assert found.parts["update"] == pytest.approx(28 * second)
    assert found.file_bytes == pytest.approx((28 + COUNT * 4 + 8 + (COUNT - 1) * 12) * OWNED)


def test_a_step_is_longer_by_what_is_exposed_less_the_passes_on_the_device():
    costs, plan = costs_of(), ZERO3.replace(offload=ALL)
    extra = costs.update_of(plan, COUNT) - costs.update_of(ZERO3, COUNT)
    assert extra == pytest.approx(costs.offload(plan, 0, COUNT).extra)
    assert costs.least(plan, BATCH) == pytest.approx(costs.least(ZERO3, BATCH) + extra)


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3", "zero3-once"])
def test_memory_is_less_by_the_moments(shard):
    plan = ZERO3.replace(shard=shard)
    (before,), (after,) = (memory_of(WORKLOAD, each, BATCH) for each in (plan, plan.replace(offload=STATE)))
    saved = before.parts["optimizer"] - after.parts["optimizer"]
    shards = 1 if shard == "none" else 8
    assert saved == pytest.approx(8 * WORKLOAD.parameters / shards)
    assert after.peak - after.states == pytest.approx(before.peak - before.states)


def test_with_all_state_in_files_buffers_and_one_pass_are_left():
    plan = ZERO3.replace(offload=ALL)
    (found,) = memory_of(WORKLOAD, plan, BATCH)
    assert found.states == 0
    end = WORKLOAD.embedding.parameters.total + WORKLOAD.end.parameters.total
    assert found.parts["staging"] == staging_bytes(plan, OWNED, end / 8)[0]
    assert staging_bytes(plan, 1000, 10) == (4 * 4 * 10, 4 * 3 * 4 * 1000)
    tiny = workload_of(SMALL)
    (found,) = memory_of(tiny, plan, BATCH)
    assert found.moment == "optimizer"
    assert found.peak == found.parts["staging"] == 3 * 4 * 4 * tiny.parameters / 8


def test_activations_in_files_pass_once_each_way_and_leave_two_layers_in_memory():
    plan = ZERO3.replace(offload="activations:file")
    layers = [kept_bytes(each, WORKLOAD, Layout.of(plan), is_layer=True) for each in WORKLOAD.layers]
    found = costs_of().offload(plan, 0, COUNT)
    assert found.file_bytes == pytest.approx(2 * COUNT * sum(layers))
    assert found.parts["update"] == found.replaced
    (before,), (after,) = (memory_of(WORKLOAD, each, BATCH) for each in (ZERO3, plan))
    (stage,) = costs_of().stages(ZERO3, COUNT)
    assert found.parts["forward"] == pytest.approx(COUNT * max(0, sum(layers) / 1e9 - stage.forward))
    ends = before.kept - sum(layers)
    assert after.kept == pytest.approx(ends + layers[0])
    assert after.peak < before.peak


@pytest.mark.parametrize("plan", ["dp=8", "dp=4,pp=2", "dp=2,pp=2,tp=2,schedule=zb-v"])
@pytest.mark.parametrize("recompute", ["none", "full:8", "selective"])
def test_each_block_in_files_frees_its_bytes_and_moves_them_each_way(plan, recompute):
    plan = SettledPlan.parse(f"{plan},microbatch=1,precision=bf16,split=count,recompute={recompute}")
    machines = machine()
    costs, memories = Costs(WORKLOAD, machines), Memories(WORKLOAD, machines)
    count, moved, kept = plan.microbatches_of(BATCH), [], []
    for number in (8, 16, 24, 32):
        some = plan.replace(offload=f"activations:file:{number}")
        moved.append(costs.offload(some, 0, count).file_bytes / 2 / count)
        pieces = by_piece(memories, some, BATCH)
        assert sum(each.stored > 0 for each in pieces) == number
        assert sum(each.stored for each in pieces if each.place == 0) == pytest.approx(moved[-1])
        assert not any(each.stored and each.activations for each in pieces)
        kept.append(memories.of(some, BATCH)[0].kept)
    every = plan.replace(offload="activations:file")
    assert moved == sorted(moved)
    assert kept == sorted(kept, reverse=True)
    assert moved[-1] == pytest.approx(costs.offload(every, 0, count).file_bytes / 2 / count)
    assert kept[-1] == memories.of(every, BATCH)[0].kept


def test_on_cpus_moving_activations_takes_the_processor_s_time():
    cluster = Cluster.preset("laptop", 1).replace(host=Host(file_bandwidth=1e15))
    workload = workload_of(SMALL)
    plan = SettledPlan(microbatch=2, offload="activations:file:4")
    costs = Costs(workload, cluster)
    layer = kept_bytes(workload.layers[0], workload, Layout.of(plan), is_layer=True)
    found = costs.offload(plan, 0, 3)
    assert found.parts["forward"] == pytest.approx(3 * 4 * layer / MOVED_RATE)
    assert found.parts["backward"] == pytest.approx(3 * 4 * layer / MOVED_RATE)
    assert found.waits == pytest.approx(0, abs=1e-9)


def test_on_cpus_the_host_s_memory_is_the_device_s():
    cluster = Cluster.preset("laptop", 8)
    plan = ZERO3.replace(offload="optimizer:host")
    (found,), (before,) = (memory_of(WORKLOAD, each, BATCH, cluster) for each in (plan, ZERO3))
    assert found == before
    assert Costs(WORKLOAD, cluster).offload(plan, 0, COUNT).extra == 0


def test_devices_that_have_a_host_alone_get_all_of_it():
    alone = offload(STATE, machine(host=dataclasses.replace(HOST, devices=1)))
    assert alone.parts["update"] == pytest.approx(offload(STATE).parts["update"] / 8)


def test_what_cannot_be_offloaded_is_refused():
    with pytest.raises(ClusterError, match="host_bandwidth"):
        offload("optimizer:host", machine(link=0.0))
    with pytest.raises(ClusterError, match="file_bandwidth"):
        offload(STATE, machine(host=dataclasses.replace(HOST, file_bandwidth=0.0)))
    with pytest.raises(ClusterError, match="on each host"):
        offload("optimizer:host", machine(host=dataclasses.replace(HOST, memory=1e9)))


def test_presets_of_accelerators_know_their_hosts_and_files_keep_them(tmp_path):
    cluster = Cluster.preset("dgx-h100", 16)
    assert cluster.host.bandwidth > 0
    assert Cluster.preset("dgx-2").host.devices == 16
    cluster.write(tmp_path / "cluster.toml")
    assert Cluster.read(tmp_path / "cluster.toml") == cluster
