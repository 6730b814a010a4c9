"""The formulas that docs/concepts/cost-model.md writes itself are those of the code."""

import pytest

from shoal.cluster import Cluster, Level
from shoal.cost.compute import pass_seconds
from shoal.cost.network import Group, collective_seconds
from shoal.cost.step import Costs
from shoal.plan import Plan
from shoal.workload import shape, workload_of

WORKLOAD = workload_of(shape("llama2-7b"))
BATCH = 512


@pytest.mark.parametrize("gbits", [400, 10], ids="{} Gbit/s".format)
@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
def test_what_data_parallelism_does_not_hide(shard, gbits):
    cluster = Cluster.preset("dgx-h100", 64)
    network = Level(name="network", devices=64, bandwidth=gbits * 1e9 / 8)
    cluster = cluster.replace(levels=(cluster.levels[0], network))
    plan = Plan(dp=64, shard=shard, microbatch=2, precision="bf16")
    costs = Costs(WORKLOAD, cluster)
    m = BATCH // plan.dp // plan.microbatch
    (stage,) = costs.stages(plan, m)
    f, b, c = stage.forward, stage.input + stage.weight, cluster.device.contention

    def seconds(collective, width):
        return collective_seconds(collective, width * WORKLOAD.parameters, Group(64), cluster)

    g, r, a = seconds("all_gather", 2), seconds("reduce_scatter", 4), seconds("all_reduce", 4)
    expected = {
        "none": max(c * a, a - b),
        "zero1": max(c * r, r - b) + max(c * g, g - f),
        "zero2": m * max(c * r, r - b) + max(c * g, g - f),
        "zero3": m * (max(0, g - f) + max(0, g + r - b) + c * (2 * g + r)),
    }
    assert costs.step(plan, BATCH).parts["data"] == pytest.approx(expected[shard])


def test_what_the_optimizer_moves():
    cluster = Cluster.preset("dgx-h100", 64)
    plan = Plan(dp=64, shard="zero1", microbatch=1, precision="bf16")
    expected = pass_seconds(cluster.device, 30 * WORKLOAD.parameters / 64, 4)
    assert Costs(WORKLOAD, cluster).step(plan, BATCH).parts["optimizer"] == pytest.approx(expected)
