"""More of a resource makes no best Plan slower, on machines that are drawn at random."""

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_plans import random_cluster

from shoal.predict.planner import Search, choose
from shoal.predict.planner.refine import LEAST_GAIN, SIMPLER
from shoal.predict.planner.search import SLACK
from shoal.spec.workload import ModelShape, workload_of

SHAPE = ModelShape(layers=2, hidden=2048, ffn=8192, heads=4, kv_heads=2, vocab=32000, seq=2048)
MODELS = [workload_of(SHAPE), workload_of(SHAPE.replace(experts=4, experts_per_token=2, expert_ffn=4096))]
BATCH = 8
RESOURCES = ["FLOP/s", "memory's rate", "memory", "links", "network"]


def with_more(cluster, resource, factor):
    """The machine with so many times a resource."""
    device, levels = cluster.device, list(cluster.levels)
    if resource == "FLOP/s":
        device = replace(device, peak={name: factor * rate for name, rate in device.peak.items()})
    elif resource == "memory's rate":
        device = replace(device, bandwidth=factor * device.bandwidth)
    elif resource == "memory":
        device = replace(device, memory=factor * device.memory)
    else:
        level = 0 if resource == "links" else -1
        levels[level] = replace(levels[level], bandwidth=factor * levels[level].bandwidth)
    return cluster.replace(device=device, levels=tuple(levels))


def machine(seed):
    chance = random.Random(seed)
    cluster = random_cluster(chance, chance.choice((2, 4)))
    return cluster.replace(device=replace(cluster.device, memory=chance.choice((8e9, 1.6e10, 8e10))))


def machines():
    return st.builds(machine, st.integers(0, 1 << 40))


@given(machines(), st.sampled_from(MODELS), st.sampled_from(RESOURCES), st.sampled_from((1.1, 2.0, 10.0)))
@example(machine(191), MODELS[1], "memory's rate", 2.0)  # a found schedule is best with half of the
@example(machine(243), MODELS[0], "memory's rate", 2.0)  # micro-batch that other schedules are best with
@example(machine(156), MODELS[0], "FLOP/s", 1.1)  # a device becomes quicker than its host starts a block
@settings(max_examples=8)
def test_more_of_a_resource_makes_no_best_plan_slower(cluster, workload, resource, factor):
    more = with_more(cluster, resource, factor)
    before, after = (Search(workload, each, BATCH).best(1).best for each in (cluster, more))
    if before is not None:
        assert after.seconds * (1 - SLACK) <= before.seconds * (1 + 1e-9)
        before, after = (choose(workload, each, BATCH, limit=1).best for each in (cluster, more))
        assert after.seconds * (1 - SLACK) <= before.seconds * (1 + SIMPLER) / (1 - LEAST_GAIN)


@given(machines(), st.sampled_from(MODELS), st.sampled_from((0.0, 0.05, 0.3)))
@settings(max_examples=5)
def test_more_room_in_memory_makes_no_best_plan_slower(cluster, workload, margin):
    before, after = (
        Search(workload, cluster, BATCH, margin=each).best(1).best for each in (margin + 0.2, margin)
    )
    if before is not None:
        assert after.seconds * (1 - SLACK) <= before.seconds * (1 + 1e-9)
