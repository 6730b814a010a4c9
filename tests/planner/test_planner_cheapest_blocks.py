"""Recompute in as few blocks as fit."""

import dataclasses

import pytest

from shoal.cluster import Cluster
from shoal.planner import choose
from shoal.planner.cheapest_blocks import with_cheapest_blocks
from shoal.planner.search import Search
from shoal.workload import shape, workload_of

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
