"""The formulas that docs/concepts/cost-model.md writes itself are those of the code."""

import pytest

from shoal.predict.cost.collectives.network import collective_load, collective_seconds
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.compute import pass_seconds
from shoal.predict.cost.time.step import Costs
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster, Level
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.workload import shape, workload_of

WORKLOAD = workload_of(shape("llama2-7b"))
BATCH = 512
RANKS = 64


@pytest.mark.parametrize("gbits", [400, 10], ids="{} Gbit/s".format)
@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3", "zero3-once"])
def test_what_data_parallelism_does_not_hide(shard, gbits):
    cluster = Cluster.preset("dgx-h100", RANKS)
    network = Level(name="network", devices=RANKS, bandwidth=gbits * 1e9 / 8)
    cluster = cluster.replace(levels=(cluster.levels[0], network))
    # Buckets that hold a layer each, as with zero3.
    layer, embedding, end = (
        each.parameters.total for each in (WORKLOAD.layers[0], WORKLOAD.embedding, WORKLOAD.end)
    )
    plan = SettledPlan(dp=RANKS, shard=shard, microbatch=2, precision="bf16", bucket=2 * layer)
    costs = Costs(WORKLOAD, cluster)
    m, layers = BATCH // plan.dp // plan.microbatch, len(WORKLOAD.layers)
    (stage,) = costs.stages(plan, m)
    f, b = stage.forward, stage.input + stage.weight
    c = cluster.device.contention * collective_load(Group(RANKS), cluster)
    first, one, last = (
        costs.block(block, Layout.of(plan))
        for block in (WORKLOAD.embedding, WORKLOAD.layers[0], WORKLOAD.end)
    )

    def in_buckets(parameters):
        return 1 if shard.startswith("zero3") else -(-parameters // layer)

    def copied(parameters):
        """Two passes for each bucket: from 2 bytes to 4, and to the sum of this rank's part."""
        if shard in ("none", "zero1", "zero3-once"):
            return 0.0
        nbytes = (2 + 4 + 3 * 4 / RANKS) * parameters
        return pass_seconds(cluster.device, nbytes, 2 * in_buckets(parameters))

    def seconds(collective, width, parameters):
        """As one collective after another, of at most a bucket each."""
        number = in_buckets(parameters)
        nbytes = width * parameters / number
        return number * collective_seconds(collective, nbytes, Group(RANKS), cluster)

    kind = "all_reduce" if shard == "none" else "reduce_scatter"
    reduced = [seconds(kind, 4, count) for count in (embedding, layer, end)]
    gathered = [seconds("all_gather", 2, count) for count in (embedding, layer, end)]

    def reduce(also=0.0):
        """With the links' seconds until all is there, for each bucket that may come late."""
        r = reduced[0] + layers * reduced[1] + reduced[2]
        copies = copied(embedding) + layers * copied(layer) + copied(end)
        met = [
            last.backward + copied(end) + r,
            last.backward + copied(end) + one.backward + copied(layer) + r - reduced[2],
            b - first.backward + copies - copied(embedding) + reduced[1] + reduced[0],
            also + r if also else 0.0,
        ]
        return copies + max(c * (r - reduced[0] + also) + reduced[0], max(met) - (b + copies))

    g, of_ends = layers * gathered[1], gathered[0] + gathered[2]
    after = one.forward + last.forward
    begun = max(0.0, gathered[1] - first.forward)
    gather = of_ends + max(c * (g - gathered[1]) + begun, g - (f - after))
    also = g - gathered[1]
    again = max(c * also, also - (layers - 1) * one.backward)
    expected = {
        "none": reduce(),
        "zero1": gather + reduce(),
        "zero2": gather + m * reduce(),
        "zero3-once": m * (gather + again) + max(0.0, reduce(also) - again),
        "zero3": m * (gather + reduce(also)),
    }
    passes = m * (f + b) + costs.norm(plan) + costs.update_of(plan, m)
    assert costs.least(plan, BATCH) - passes == pytest.approx(expected[shard], abs=1e-9)
    played = played_seconds(costs, plan, BATCH)
    assert 0.97 * played <= costs.least(plan, BATCH) <= played * (1 + 1e-9)


def test_what_the_optimizer_moves():
    cluster = Cluster.preset("dgx-h100", 64)
    plan = SettledPlan(dp=64, shard="zero1", microbatch=1, precision="bf16")
    expected = pass_seconds(cluster.device, 30 * WORKLOAD.parameters / 64, 4)
    assert Costs(WORKLOAD, cluster).update_of(plan, 8) == pytest.approx(expected)
