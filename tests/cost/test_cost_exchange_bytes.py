"""What looser exchange sends, by the formulas; a merge is paid once in every so many steps."""

import pytest

from shoal.cluster import Cluster
from shoal.cost import Costs
from shoal.cost.time.wire import Wire
from shoal.plan import Group, Plan, SettledPlan
from shoal.simulate import played_seconds
from shoal.workload import ModelShape, workload_of

SHAPE = ModelShape(layers=4, hidden=1024, ffn=4096, heads=16, vocab=8192, seq=512)
WORKLOAD = workload_of(SHAPE)
CLUSTER = Cluster.preset("dgx-a100", 32)
ELEMENTS = 1 << 22


def sums_of(text, ranks=8):
    plan = Plan.parse(f"dp={ranks},{text}")
    wire = Wire.of(plan, WORKLOAD)
    shards, replicas = (Group(1), Group(ranks)) if "shard" not in text else (Group(ranks), Group(1))
    return [(each.operation, each.nbytes) for each in wire.sums(ELEMENTS, shards, replicas, CLUSTER)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reduce=fp32", [("all_reduce", 4)]),
        ("compress=int8", [("all_to_all", 1 + 4 / 1024), ("all_gather", 1 + 4 / 1024)]),
        ("compress=sign", [("all_to_all", 1 / 8 + 4 / 1024), ("all_gather", 1 / 8 + 4 / 1024)]),
        ("compress=topk:64", [("all_gather", 8 * (1.5 + 4) / 64)]),
        ("compress=random:16", [("all_reduce", 4 / 16)]),
        ("shard=zero1,compress=int4", [("all_to_all", 1 / 2 + 4 / 1024)]),
        ("shard=zero1", [("reduce_scatter", 4)]),
    ],
)
def test_bytes_of_an_exchange(text, expected):
    found = sums_of(text)
    assert [operation for operation, _ in found] == [operation for operation, _ in expected]
    for (_, nbytes), (_, each) in zip(found, expected, strict=True):
        assert nbytes == pytest.approx(each * ELEMENTS, rel=1e-3)


def test_powersgd_sends_both_factors_of_every_matrix():
    """Of a square block of side n, r (n + n) elements go for n n; the model's matrices are wider."""
    found = sums_of("compress=powersgd:2")
    assert [operation for operation, _ in found] == ["all_reduce", "all_reduce"]
    sent = sum(nbytes for _, nbytes in found) / (4 * ELEMENTS)
    assert 2 * 2 / 4096 < sent < 2 * 2 / 256


def test_a_merge_costs_what_an_exchange_does_once_in_every_steps():
    plan = SettledPlan.of(Plan.parse("dp=32,microbatch=1,exchange=local,every=10"), 32)
    costs = Costs(WORKLOAD, CLUSTER)
    seldom = played_seconds(costs, plan.replace(every=1000), 32)
    ten, twenty = (played_seconds(costs, plan.replace(every=every), 32) for every in (10, 20))
    assert ten - seldom == pytest.approx((1 / 10 - 1 / 1000) / (1 / 20 - 1 / 1000) * (twenty - seldom))
    assert seldom < twenty < ten < played_seconds(costs, plan.replace(exchange="bucketed", every=20), 32)


def test_a_delay_hides_the_exchange_but_not_its_passes():
    plan = SettledPlan.of(Plan.parse("dp=32,microbatch=1,exchange=local,every=10,fragments=2"), 32)
    costs = Costs(WORKLOAD, CLUSTER)
    alone = played_seconds(costs, plan.replace(every=10_000), 32)
    hidden = played_seconds(costs, plan.replace(delay=4), 32)
    assert alone < hidden < played_seconds(costs, plan, 32)
