"""What docs/guides/choosing.md claims is what the planner and the cost model say."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "docs"))

import choosing
from choosing import best, only_data, quickest_sharded, with_network, work

from shoal.spec.cluster import Cluster

H100 = Cluster.preset("dgx-h100", 64)


def seconds(model, cluster, accept, length=None):
    found = best(work(model, length), cluster, accept)
    return None if found is None else found.seconds


def test_sharding_costs_little_while_everything_fits():
    steps = [quickest_sharded(work("gpt3-1.3b"), H100, shard)[0] for shard in choosing.SHARDS]
    assert max(steps) < 1.1 * min(steps)
    assert steps[choosing.SHARDS.index("zero1")] < 1.02 * steps[choosing.SHARDS.index("none")]


def test_larger_models_need_more_sharded():
    fitting = [
        sum(quickest_sharded(work(model), H100, shard)[0] is not None for shard in choosing.SHARDS)
        for model in choosing.DENSE
    ]
    assert fitting == sorted(fitting, reverse=True)
    assert fitting[0] == len(choosing.SHARDS)
    assert fitting[-1] == 1
    for model in choosing.DENSE:
        memory = [quickest_sharded(work(model), H100, shard)[1] for shard in choosing.SHARDS]
        assert memory == sorted(memory, reverse=True)


def test_more_sharding_than_needed_can_be_quicker():
    assert (
        quickest_sharded(work("llama3-8b"), H100, "zero3")[0]
        < quickest_sharded(work("llama3-8b"), H100, "zero1")[0]
    )


def test_the_network_that_is_needed_falls_with_tokens_but_for_zero3():
    needs = {
        shard: [choosing.least_network(shard, tokens) for tokens in choosing.TOKENS_PER_DEVICE]
        for shard in ("none", "zero1", "zero3")
    }
    for shard in ("none", "zero1"):
        assert needs[shard][0] > needs[shard][1] > needs[shard][2]
    assert needs["zero3"] == pytest.approx([needs["zero3"][0]] * 3, rel=0.05)
    assert all(one < none for one, none in zip(needs["zero1"], needs["none"], strict=True))


def test_tensor_parallelism_is_needed_where_devices_outnumber_samples():
    def both(devices):
        cluster = Cluster.preset("dgx-h100", devices)
        return [seconds("llama3-70b", cluster, accept) for accept in (only_data, choosing.data_and_tensor)]

    few, more, many = map(both, choosing.DEVICES)
    for alone, together in (few, more):
        assert 0.8 * alone < together <= alone
    assert many[0] is None
    assert many[1] is not None


def test_tensor_parallelism_is_for_links_inside_a_node():
    def found(machine, tp):
        cluster = Cluster.preset(machine, 64)
        return best(work("llama3-70b"), cluster, lambda d: (d.tp, d.pp, d.cp) == (tp, 1, 1))

    within = [found("dgx-h100", tp).parts["tensor"] for tp in (8, 16, 32)]
    assert within[2] > 1.5 * within[1] > 1.5**2 * within[0]
    assert found("gb200-nvl72", 16).seconds > 1.1 * found("gb200-nvl72", 4).seconds


def test_pipelines_pay_on_slow_networks_and_hardly_depend_on_them():
    fast, *_, slow = ((with_network(H100, gbits)) for gbits in choosing.NETWORKS)
    model = "llama2-70b"
    assert seconds(model, fast, choosing.data_and_pipeline) > 0.95 * seconds(model, fast, only_data)
    piped = seconds(model, slow, choosing.data_and_pipeline)
    assert piped < 0.8 * seconds(model, slow, only_data)
    doubled = with_network(H100, 2 * choosing.NETWORKS[-1])
    assert piped < 1.05 * seconds(model, doubled, choosing.data_and_pipeline)


def test_context_parallelism_takes_sequences_that_no_device_can_and_helps_before():
    short, *_, long = choosing.LENGTHS
    assert seconds("llama3-8b", H100, only_data, long) is None
    assert seconds("llama3-8b", H100, choosing.data_and_context, long) is not None
    assert seconds("llama3-8b", H100, choosing.data_and_context, short) < seconds(
        "llama3-8b", H100, only_data, short
    )


def test_expert_parallelism_changes_little_within_a_node_and_is_quickest_over_a_few():
    cluster = Cluster.preset("dgx-h100", 1024)
    steps = {
        ep: seconds("deepseek-v3", cluster, lambda d, ep=ep: only_data(d) and d.ep == ep)
        for ep in choosing.EXPERTS
    }
    assert steps[1] is None
    assert steps[8] == pytest.approx(steps[4], rel=0.05)
    assert steps[16] < 0.7 * steps[8]
    assert min((step, ep) for ep, step in steps.items() if step is not None)[1] == 32
