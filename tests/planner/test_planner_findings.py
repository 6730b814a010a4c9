"""Questions of owners of clusters, to which the planner once gave answers that did not fit together."""

import re
from dataclasses import replace

import pytest

from shoal.predict.cost import Costs
from shoal.predict.cost.collectives import algorithm_seconds
from shoal.predict.cost.time import workload_on
from shoal.predict.planner import Search, choose
from shoal.predict.planner.refine import SIMPLER
from shoal.predict.planner.search import SLACK
from shoal.predict.simulate import played_seconds, simulate
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import Group, SettledPlan
from shoal.spec.workload import ModelShape, shape, workload_of


def with_rate(cluster, level, factor):
    """The machine with so many times the rate of a level's links."""
    levels = list(cluster.levels)
    levels[level] = replace(levels[level], bandwidth=factor * levels[level].bandwidth)
    return cluster.replace(levels=tuple(levels))


def test_messages_between_nodes_are_priced_by_the_network_and_those_within_by_their_links():
    cluster = Cluster.parse("dgx-h100:64")
    plan = SettledPlan.parse("dp=1,pp=64,schedule=1f1b,microbatch=1,precision=bf16")
    workload = workload_on(cluster, shape("llama3-70b"))
    slow_network, slow_links = with_rate(cluster, -1, 0.01), with_rate(cluster, 0, 0.1)
    costs, slower, within = (Costs(workload, each) for each in (cluster, slow_network, slow_links))
    for place in range(63):
        send, on_slow_network, on_slow_links = (
            each.send(plan, place, place + 1) for each in (costs, slower, within)
        )
        if place % 8 == 7:
            assert on_slow_network > 10 * send
            assert on_slow_links == pytest.approx(send, rel=0.5)
        else:
            assert on_slow_network == send
            assert on_slow_links > 2 * send
    seconds = played_seconds(costs, plan, 128)
    assert played_seconds(slower, plan, 128) > 1.2 * seconds
    assert played_seconds(within, plan, 128) > seconds
    assert simulate(workload, slow_network, plan, 128).seconds > 1.2 * seconds


def test_the_number_of_rows_changes_neither_the_winner_nor_its_time():
    cluster = Cluster.parse("dgx-a100:8")
    workload = workload_on(cluster, shape("350m"))
    one, *others = (choose(workload, cluster, 64, limit=limit) for limit in (1, 5, 60))
    for each in others:
        assert each.best.plan == one.best.plan
        assert each.best.seconds == one.best.seconds
        assert each.explain().winner.plan == one.best.plan


@pytest.mark.parametrize(("network", "batch"), [(1e9, 256), (1e10, 64)])
def test_where_the_network_adds_up_gradients_are_summed_whole(network, batch):
    """An all-reduce in the network sends each byte once; the two halves of a sharded one send 2(k-1)/k."""
    device = Device(name="made-up", memory=1e12, bandwidth=1e12, peak={"bf16": 1e14, "fp32": 2e13}, units=64)
    links = Level(name="network", devices=4, bandwidth=network)
    plain = Cluster(
        name="made-up", device=device, levels=(Level(name="node", devices=1, bandwidth=1e11), links)
    )
    adds_up = plain.replace(levels=(plain.levels[0], replace(links, reduces=True, reduction_share=0.8)))
    workload = workload_of(
        ModelShape(layers=2, hidden=1024, ffn=4096, heads=8, kv_heads=4, vocab=32000, seq=1024)
    )
    (before,), (after,) = (Search(workload, each, batch).best(1).candidates for each in (plain, adds_up))
    assert before.plan.sharding.name != "none"
    assert after.plan.sharding.name == "none"
    assert after.plan.dp == before.plan.dp == 4
    assert after.seconds < 0.97 * before.seconds
    group, nbytes = Group(4), 256e6
    seconds = algorithm_seconds("all_reduce", nbytes, group, adds_up)
    assert seconds["switch"] == pytest.approx(nbytes / (0.8 * network) + links.latency, rel=1e-3)
    assert min(seconds, key=seconds.__getitem__) == "switch"


BY_HAND = "dp=2048,tp=4,cp=2,replicate=256,shard=zero1,tensor=async,microbatch=1,bucket=256MiB,precision=bf16"


@pytest.mark.long
def test_no_plan_by_hand_beats_the_planner_on_16384_devices():
    cluster = Cluster.parse("dgx-h100:16384")
    workload = workload_on(cluster, shape("llama3-8b"))
    best = choose(workload, cluster, 2048, limit=1).best
    assert best.seconds == pytest.approx(simulate(workload, cluster, best.plan, 2048).seconds, rel=1e-6)
    assert best.seconds <= simulate(workload, cluster, SettledPlan.parse(BY_HAND), 2048).seconds


@pytest.mark.parametrize(
    ("model", "machine", "batch"),
    [("gpt3-1.3b", "dgx-h100:16", 64), ("125m", "dgx-a100:8", 64), ("mixtral-8x7b", "dgx-h100:32", 128)],
)
def test_every_figure_that_a_sentence_tells_is_the_simulation_s(model, machine, batch):
    cluster = Cluster.parse(machine)
    workload = workload_on(cluster, shape(model))
    choice = choose(workload, cluster, batch, limit=3)
    told = choice.explain()
    told_plans = [*choice.candidates, told.unlimited, *(each.best for each in told.changes)]
    told_plans += [each.best for each in told.neighbours if each.best is not None]
    told_plans += [told.other] if told.other is not None else []
    for each in told_plans:
        played = simulate(workload, each.cluster, each.plan, batch).seconds
        assert each.seconds == pytest.approx(played, rel=1e-6)
    for size in told.sizes:
        played = simulate(workload, cluster, size.plan, batch).seconds
        assert size.slower == pytest.approx(played / choice.best.seconds - 1, abs=1e-6)
    text = " ".join(told.sentences())
    for pace, name in re.findall(r"the best Plan is ([\d.]+)% \w+ \(([^)]+)\)", text):
        near = [each.best for each in told.neighbours if each.best and each.best.degrees_text == name]
        (seconds,) = {each.seconds for each in near}
        assert 100 * abs(seconds / choice.best.seconds - 1) == pytest.approx(float(pace), abs=0.051)


def test_what_is_told_to_be_quicker_than_the_best_is_so_on_the_machine_that_it_names():
    cluster = Cluster.parse("dgx-h100:16")
    workload = workload_on(cluster, shape("gpt3-1.3b"))
    best, told = (choice := choose(workload, cluster, 64, limit=1)).best, choice.explain()
    for each in told.neighbours:  # on this machine nothing that fits is quicker
        assert each.best is None or each.best.seconds * (1 + SIMPLER) >= (1 - SLACK) * best.seconds
    for change in told.changes:
        if change.name != "the memory":
            assert change.best.memory.peak <= choice.search.room
            same = simulate(workload, change.best.cluster, best.plan, 64).seconds
            assert change.best.seconds <= same * (1 + 1e-6)


def test_a_cluster_need_not_be_of_whole_pods():
    assert Cluster.parse("meta-24k:16384").devices == 16384
    cluster = Cluster.parse("meta-24k:3080")  # 3,072 in a pod, and one node more
    workload = workload_on(cluster, shape("125m"))
    assert Search(workload, cluster, 3080).best(1, lambda degrees: degrees.dp == 3080).candidates
