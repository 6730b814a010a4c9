"""Plans with state outside of the devices: chosen where they are quicker, against a search of all Plans."""

import dataclasses
import itertools
import math

import pytest

from shoal.errors import PlanError
from shoal.predict.cost.memory.memory import Memories
from shoal.predict.cost.time.step import Costs
from shoal.predict.planner import choose
from shoal.predict.planner.offloaded import quicker_outside
from shoal.predict.planner.refine import LEAST_GAIN
from shoal.predict.planner.search import SLACK, Search
from shoal.predict.planner.tree import Tree
from shoal.predict.simulate import played_seconds, simulate
from shoal.spec.cluster import Cluster, Device, Host, Level
from shoal.spec.workload import ModelShape, shape, workload_of

WORKLOAD = workload_of(shape("350m"))
GIB = 2**30
SMALL = workload_of(ModelShape(layers=4, hidden=512, ffn=2048, heads=8, vocab=4096, seq=256))
ON_CPUS = [
    "+".join(parts)
    for parts in (
        ["activations:file"],
        ["optimizer:file"],
        ["optimizer:file", "gradients:file"],
        ["optimizer:file", "gradients:file", "parameters:file"],
        ["optimizer:file", "activations:file"],
        ["optimizer:file", "gradients:file", "activations:file"],
        ["optimizer:file", "gradients:file", "parameters:file", "activations:file"],
    )
]


def laptop(memory, file_bandwidth=2e9, devices=2):
    cluster = Cluster.preset("laptop", devices)
    device = dataclasses.replace(cluster.device, memory=memory)
    return cluster.replace(device=device, host=Host(devices=2, file_bandwidth=file_bandwidth))


def gpus(memory, host=2e12):
    device = Device(
        name="made-up",
        memory=memory,
        bandwidth=1e12,
        peak={"bf16": 1e14, "fp32": 2e13},
        units=64,
        host_bandwidth=5e10,
    )
    return Cluster(
        name="made-up",
        device=device,
        levels=(Level(name="links", devices=4, bandwidth=1e11),),
        host=Host(name="host", devices=4, memory=host, bandwidth=4e11),
    )


def every_plan(workload, cluster, batch, offload):
    """All Plans of a search with this `offload`."""
    shared = Search(workload, cluster, batch).outside(offload).shared
    for degrees in shared.space.degrees():
        for variant, sharding in itertools.product(
            shared.space.variants(degrees), shared.space.shardings(degrees)
        ):
            yield shared.plan(variant, sharding, shared.split(variant))


@pytest.mark.parametrize(("memory", "rate"), [(0.75 * GIB, 3e9), (0.5 * GIB, 3e9), (0.3 * GIB, 2e9)])
def test_the_choice_is_the_quickest_of_all_plans_with_and_without(memory, rate):
    cluster = laptop(memory, rate)
    costs, memories = Costs(SMALL, cluster), Memories(SMALL, cluster)
    best = dict.fromkeys(("none", *ON_CPUS), math.inf)
    for offload in best:
        for plan in every_plan(SMALL, cluster, 8, offload):
            if memories.fullest(plan, 8).required <= 0.9 * cluster.device.memory:
                best[offload] = min(best[offload], played_seconds(costs, plan, 8))
    found = choose(SMALL, cluster, 8)
    quickest = min(best.values())
    assert found.best.seconds <= quickest / (1 - LEAST_GAIN - SLACK)
    assert found.best.memory.fits(cluster, 0.1)
    assert found.best.plan.tiers.has_files == (quickest < (1 - LEAST_GAIN) * best["none"])


@pytest.mark.parametrize("offload", ["activations:file", ON_CPUS[3]])
def test_no_branch_of_a_tree_with_offload_exceeds_what_grows_from_it(offload):
    cluster = laptop(2 * GIB)
    shared = Search(SMALL, cluster, 4).outside(offload).shared
    rooms = 0.5 * GIB, GIB, math.inf

    def quickest(branch):
        if branch.branches:
            grown = [min(each) for each in zip(*map(quickest, branch.branches), strict=True)]
        else:
            plan = branch.fitted(math.inf).plan
            assert plan.offload == offload
            peak, time = shared.fullest(plan).required, shared.played(plan)
            grown = [time if peak <= room else math.inf for room in rooms]
        for room, seconds in zip(rooms, grown, strict=True):
            assert branch.seconds(room) <= seconds * (1 + 1e-9)
        return grown

    tree = Tree(shared)
    for degrees in tree.degrees:
        for portion in tree.portions(degrees):
            quickest(portion)


def test_what_fits_with_state_in_files_alone_is_chosen_and_said():
    cluster = laptop(2.5 * GIB)
    found = choose(WORKLOAD, cluster, 4)
    assert found.resident is None
    assert found.best.plan.tiers.has_files
    assert found.best.memory.fits(cluster, 0.1)
    assert simulate(WORKLOAD, cluster, found.best.plan, 4).seconds == pytest.approx(found.best.seconds)
    assert "Without offload no Plan fits" in "\n".join(found.explain().sentences())
    with pytest.raises(PlanError, match="does not fit"):
        choose(WORKLOAD, cluster, 4, may_offload=False)


def test_on_gpus_the_host_takes_the_optimizer_where_that_saves_time_and_has_room():
    found = choose(WORKLOAD, gpus(3e9), 64)
    assert found.best.plan.offload == "optimizer:host"
    assert found.best.seconds < found.resident.seconds
    assert found.resident.layout in "\n".join(found.explain().sentences())
    assert choose(WORKLOAD, gpus(3e9, host=1e9), 64).best.plan.offload == "none"


def test_where_memory_is_not_short_the_choice_is_that_without():
    roomy = gpus(8e10)
    found, plain = (choose(WORKLOAD, roomy, 64, may_offload=each) for each in (True, False))
    assert [each.plan for each in found.candidates] == [each.plan for each in plain.candidates]


def test_rates_that_are_not_known_leave_their_places_out_and_are_named():
    with pytest.raises(PlanError, match="does not fit") as raised:
        choose(WORKLOAD, laptop(2.5 * GIB, file_bandwidth=0.0), 4)
    assert "host.file_bandwidth is not known" in raised.value.possible
    search = Search(SMALL, laptop(GIB, file_bandwidth=0.0), 8)
    assert quicker_outside(search, None) is None
