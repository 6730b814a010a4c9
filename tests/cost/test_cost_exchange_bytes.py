"""What looser exchange sends, by the formulas; a merge is paid once in every so many steps."""

import pytest

from shoal.predict.cost import Costs
from shoal.predict.cost.time.buckets import Wire
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Group, Plan, SettledPlan
from shoal.spec.workload import ModelShape, workload_of

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


@pytest.mark.parametrize(
    ("text", "pushed", "pulled"),
    [
        ("", 4, 4),
        ("compress=int8", 1 + 4 / 1024, 1 + 4 / 1024),
        ("compress=topk:64,staleness=8", 5.5 / 64, 32 * 5.5 / 64),  # what each of 32 workers changed
        ("compress=int8,staleness=8", 1 + 4 / 1024, 4),  # the values themselves are fewer bytes than that
    ],
)
def test_bytes_through_servers_are_those_of_a_push_and_of_a_pull(text, pushed, pulled):
    costs = Costs(WORKLOAD, CLUSTER)
    plan = SettledPlan.of(Plan.parse(f"dp=32,microbatch=1,exchange=server,servers=4,{text}".rstrip(",")), 32)
    parameters = costs.stages(plan, 1)[0].parameters
    assert costs.merge(plan, parameters, 1).nbytes == pytest.approx(
        (pushed + pulled) * parameters.total, rel=1e-3
    )


def test_compression_pays_where_the_link_of_a_server_is_the_bound():
    costs = Costs(WORKLOAD, CLUSTER)
    whole = SettledPlan.of(Plan.parse("dp=32,microbatch=1,exchange=server,servers=4"), 32)
    assert played_seconds(costs, whole.replace(compress="int8"), 32) < 0.5 * played_seconds(costs, whole, 32)
