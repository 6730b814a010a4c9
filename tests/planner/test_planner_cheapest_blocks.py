"""Blocks that keep, recompute or store their activations, whichever is quickest, against all such Plans."""

import dataclasses
import itertools
import math

import pytest

from shoal.predict.cost import Costs, Memories
from shoal.predict.planner import choose
from shoal.predict.planner.offloaded import STATES_ON_CPUS, with_cheapest_blocks
from shoal.predict.planner.search import Search
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster, Host
from shoal.spec.plan import OFFLOADED, Tiers, block_choices
from shoal.spec.workload import ModelShape, shape, workload_of

WORKLOAD = workload_of(shape("350m"))
CLUSTER = Cluster.preset("dgx-h100", 4)


def machine(memory):
    return CLUSTER.replace(device=dataclasses.replace(CLUSTER.device, memory=memory, host_bandwidth=0.0))


@pytest.mark.parametrize("memory", [5.5e9, 6.5e9, 8e9])
def test_one_block_less_would_not_fit_and_no_more_recompute_is_quicker(memory):
    search = Search(WORKLOAD, machine(memory), 64)
    before = search.best(1).found[0]
    found = with_cheapest_blocks(search, before, may_store=False)
    assert found.seconds <= before.seconds
    assert found.memory.required <= search.room
    recomputed = found.plan.recomputed
    if recomputed.blocks is not None:
        less = f"{recomputed.policy}:{recomputed.blocks - 1}" if recomputed.blocks > 1 else "none"
        assert search.shared.fullest(found.plan.replace(recompute=less)).required > search.room
    every = search.shared.played(found.plan.replace(recompute=recomputed.policy))
    assert found.seconds <= every


def test_it_is_chosen_where_memory_is_short_and_not_where_it_is_not():
    assert choose(WORKLOAD, machine(8e9), 64).best.plan.recomputed.blocks is not None
    assert choose(WORKLOAD, machine(8e10), 64).best.plan.recompute == "none"


LAYERS, BATCH = 6, 4
SMALL = workload_of(ModelShape(layers=LAYERS, hidden=512, ffn=2048, heads=8, vocab=512, seq=1024))


def laptop(memory, rate):
    cluster = Cluster.preset("laptop", 1)
    device = dataclasses.replace(cluster.device, memory=memory * 2**30)
    return cluster.replace(device=device, host=Host(file_bandwidth=rate))


def every_plan(cluster):
    """All Plans of one rank, with all numbers of blocks that recompute, and that are in files."""
    some = range(1, LAYERS)
    recomputes = [
        "none",
        *(f"{name}:{n}" for name in ("selective", "full") for n in some),
        "selective",
        "full",
    ]
    for state in (OFFLOADED, *STATES_ON_CPUS):
        search = Search(SMALL, cluster, BATCH)
        shared = (search if state == OFFLOADED else search.outside(state)).shared
        for degrees in shared.space.degrees():
            pairs = itertools.product(shared.space.variants(degrees), shared.space.shardings(degrees))
            for variant, sharding in pairs:
                if variant.layout.recompute != "none":
                    continue
                plan = shared.plan(variant, sharding, shared.split(variant))
                for recompute, stored in itertools.product(recomputes, range(LAYERS + 1)):
                    tiers = Tiers.parse(state)
                    if stored:
                        tiers = dataclasses.replace(tiers, activations="file", blocks=stored)
                    yield plan.replace(recompute=recompute, offload=str(tiers))


@pytest.mark.parametrize(("memory", "rate"), [(0.7, 5e8), (0.45, 2e9), (0.45, 2e8), (0.3, 5e8)])
def test_no_plan_is_quicker_whatever_its_blocks_do(memory, rate):
    cluster = laptop(memory, rate)
    costs, memories, room = Costs(SMALL, cluster), Memories(SMALL, cluster), 0.9 * memory * 2**30
    best = math.inf
    for plan in every_plan(cluster):
        if costs.least(plan, BATCH) < best and memories.fullest(plan, BATCH).required <= room:
            best = min(best, played_seconds(costs, plan, BATCH))
    found = choose(SMALL, cluster, BATCH).best
    assert found.memory.required <= room
    assert found.seconds <= 1.005 * best


def test_some_blocks_keep_some_recompute_and_some_are_in_files_where_that_is_quickest():
    plan = choose(SMALL, laptop(0.7, 5e8), BATCH).best.plan
    recomputed, stored = block_choices(plan, LAYERS, LAYERS)
    assert recomputed
    assert stored
    assert len(recomputed | stored) < LAYERS
