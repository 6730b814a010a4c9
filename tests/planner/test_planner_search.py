"""The search against one that plays everything, and the bounds that let it play few Plans."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.predict.planner.tree as planner_tree
from shoal.predict.cost.memory.memory import Memories
from shoal.predict.cost.time.step import Costs
from shoal.predict.planner.memory_bound import LeastMemory
from shoal.predict.planner.search import LOOSE, SLACK, Search
from shoal.predict.planner.search_cache import Shared, balanced_split
from shoal.predict.planner.space import SIZES, Degrees, Space
from shoal.predict.planner.tree import Tree
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.schedules import kind_of
from shoal.spec.plan.stages import Cost, split_by_cost
from shoal.spec.workload import ModelShape, workload_of

DEVICE = Device(
    name="made-up",
    memory=2e9,
    bandwidth=1e12,
    peak={"bf16": 1e14, "fp32": 2e13},
    units=64,
    source="for tests",
)
SHAPE = ModelShape(layers=6, hidden=1024, ffn=4096, heads=8, kv_heads=4, vocab=32000, seq=1024)
EXPERTS = SHAPE.replace(experts=4, experts_per_token=2, expert_ffn=2048)
UNLIKE = EXPERTS.replace(dense_layers=2)


def cluster(devices=8, node=4, memory=2e9, network=1e10):
    levels = (
        Level(name="links", devices=min(node, devices), bandwidth=1e11, source="for tests"),
        Level(name="network", devices=devices, bandwidth=network, source="for tests"),
    )
    device = dataclasses.replace(DEVICE, memory=memory)
    return Cluster(name="made-up", device=device, levels=levels, price=2.0)


def every_plan(space):
    """The Plans of a space, each with what it is a variant of."""
    shared = Shared(space.workload, space.cluster, space.batch)
    for degrees in space.degrees():
        for variant, sharding in itertools.product(space.variants(degrees), space.shardings(degrees)):
            counts = shared.split(variant)
            yield variant, sharding, counts, shared.plan(variant, sharding, counts)


@pytest.mark.parametrize(
    ("shape", "memory", "network"),
    [(SHAPE, 1.6e9, 1e10), (SHAPE, 1e12, 1e9), (EXPERTS, 4e9, 1e10), (UNLIKE, 3e9, 1e9)],
    ids=["dense-small", "dense-large", "experts", "unlike-small"],
)
def test_the_search_finds_what_playing_everything_finds(shape, memory, network):
    workload, machine = workload_of(shape), cluster(devices=4, node=2, memory=memory, network=network)
    ranking = Search(workload, machine, 8).best(3)
    costs, memories = Costs(workload, machine), Memories(workload, machine)
    best, legal = {}, 0
    for variant, _, _, plan in every_plan(Space(workload, machine, 8)):
        legal += 1
        for each in with_buckets(plan):
            if memories.fullest(each, 8).peak <= 0.9 * memory:
                seconds = played_seconds(costs, each, 8)
                best[variant.degrees] = min(seconds, best.get(variant.degrees, seconds))
    expected = sorted(best.values())[:3]
    assert len(ranking.candidates) == len(expected)
    slacks = [SLACK, *[LOOSE] * (len(expected) - 1)]
    for candidate, seconds, slack in zip(ranking.candidates, expected, slacks, strict=True):
        assert candidate.seconds == played_seconds(costs, candidate.plan, 8)
        assert memories.fullest(candidate.plan, 8).peak <= 0.9 * memory
        assert (1 - slack) * candidate.seconds <= seconds * (1 + 1e-9)
    assert ranking.legal == legal
    assert ranking.played < legal / 4


def with_buckets(plan):
    """The Plan with each size of buckets that the search may play."""
    if plan.dp * plan.cp == 1 or plan.sharding.cuts_weights:
        return [plan]
    return [plan.replace(bucket=size) for size in SIZES]


@pytest.mark.parametrize("shape", [SHAPE, UNLIKE], ids=["dense", "unlike"])
def test_no_plan_is_smaller_than_its_bounds(shape):
    workload, machine = workload_of(shape), cluster()
    search, least = Search(workload, machine, 12), LeastMemory(workload, machine)
    memories = Memories(workload, machine)
    for variant, sharding, counts, plan in every_plan(Space(workload, machine, 12)):
        degrees = variant.degrees
        peak = memories.fullest(plan, 12).peak * (1 + 1e-12)
        states = least.states(degrees, sharding, variant.layout.precision)
        for share in least.share(variant, counts), least.share_of_degrees(degrees, variant.layout):
            assert least.peak(share, states) <= peak
            of_states = share.dense * states.dense + share.experts * states.experts
            assert of_states <= least.for_states(share, peak) * (1 + 1e-12)
    assert search.best(1).candidates


@pytest.mark.parametrize(
    ("shape", "network"),
    [(EXPERTS, 1e8), (UNLIKE, 1e10)],
    ids=["experts-slow", "unlike-quick"],
)
def test_no_branch_of_the_tree_exceeds_what_grows_from_it(shape, network):
    shared = Shared(workload_of(shape), cluster(devices=4, node=2, network=network), 8)
    tree = Tree(shared)
    rooms = 2e9, 4e9, math.inf
    plans = []

    def quickest(branch):
        """The seconds of the quickest Plan that grows from a branch, for each room."""
        if branch.branches:
            assert {each.degrees for each in branch.branches} == {branch.degrees}
            grown = [min(each) for each in zip(*map(quickest, branch.branches), strict=True)]
        else:
            plan = branch.fitted(math.inf).plan
            plans.append(of_any_bucket(plan))
            sized = [(shared.fullest(each).peak, shared.played(each)) for each in with_buckets(plan)]
            grown = [min((time for peak, time in sized if peak <= room), default=math.inf) for room in rooms]
        for room, seconds in zip(rooms, grown, strict=True):
            assert branch.seconds(room) <= seconds * (1 + 1e-9)
        return grown

    for degrees in tree.degrees:
        for portion in tree.portions(degrees):
            quickest(portion)
    assert sorted(plans) == sorted(of_any_bucket(plan) for *_, plan in every_plan(shared.space))
    assert len(plans) == sum(map(tree.count, tree.degrees))


@pytest.mark.parametrize("shape", [SHAPE, UNLIKE], ids=["dense", "unlike"])
def test_bounds_save_work_and_change_no_result(shape, monkeypatch):
    workload, machine = workload_of(shape), cluster(devices=4, node=2, memory=3e9)
    usual = Search(workload, machine, 8).best(3)
    for name in ("_Portion", "_Laid", "_Cut", "_Sharded", "_Staged", "_Timed"):
        monkeypatch.setattr(getattr(planner_tree, name), "seconds", without_bound)
    found = Search(workload, machine, 8).best(3)
    assert usual.found == found.found
    assert (usual.legal, usual.played) == (found.legal, found.played)


def without_bound(branch, room):
    return 0.0


def of_any_bucket(plan):
    return str(plan.replace(bucket=1 << 20))


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
def test_every_plan_of_the_space_is_for_all_devices_and_the_batch(shape):
    plans = [plan for *_, plan in every_plan(Space(workload_of(shape), cluster(), 16))]
    assert len(set(plans)) == len(plans)
    for plan in plans:
        plan.require_ranks(8)
        assert SettledPlan.of(plan, 16) == plan


def test_what_the_space_leaves_out_of_context_parallelism_is_not_quicker():
    workload, machine = workload_of(SHAPE), cluster()
    costs = Costs(workload, machine)
    for context, recompute in itertools.product(("ring", "ulysses"), ("none", "full")):
        same = {"context": context, "recompute": recompute, "shard": "zero1", "precision": "bf16"}
        left_out = played_seconds(costs, SettledPlan(dp=2, cp=4, microbatch=4, **same), 16)
        assert played_seconds(costs, SettledPlan(dp=8, cp=1, microbatch=1, **same), 16) <= left_out


def test_degrees_divide_heads_layers_experts_and_batch():
    for degrees in Space(workload_of(EXPERTS), cluster(), 4).degrees():
        assert SHAPE.heads % degrees.tp == 0
        assert degrees.pp <= SHAPE.layers
        assert EXPERTS.experts % degrees.ep == 0
        assert 4 % degrees.dp == 0


def test_only_accepted_degrees_are_found():
    ranking = Search(workload_of(SHAPE), cluster(), 16).best(3, lambda degrees: degrees.tp == 2)
    assert ranking.candidates
    assert {each.plan.tp for each in ranking.candidates} == {2}


def test_a_machine_with_no_memory_has_no_plan():
    assert not Search(workload_of(SHAPE), cluster(memory=1e8), 16).best(1).candidates


def test_degrees_are_named_as_in_a_plan():
    best = Search(workload_of(SHAPE), cluster(), 16).best(1).best
    assert all(getattr(best.plan, name) == getattr(best.degrees, name) for name in Degrees._fields)


@settings(deadline=None, max_examples=200)
@given(
    st.floats(0, 5),
    st.floats(0, 5),
    st.integers(1, 40),
    st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zb-v", 2)]),
    st.integers(2, 6),
)
def test_a_balanced_split_has_the_least_largest_rank(embedding, end, layers, schedule, ranks):
    name, virtual = schedule
    if layers < ranks * virtual:
        layers = ranks * virtual
    placement = kind_of(name).placement(ranks, virtual)
    split = balanced_split(embedding, 1.0, end, layers, placement)
    assert sum(split) == layers
    assert min(split[1:-1], default=1) >= 1

    def largest(pieces):
        loads = [0.0] * ranks
        for stage, count in enumerate(pieces):
            loads[placement[stage]] += count
        loads[placement[0]] += embedding
        loads[placement[-1]] += end
        return max(loads)

    costs = [Cost(embedding, 0), *[Cost(1.0, 0)] * layers, Cost(end, 0)]
    searched = list(split_by_cost(costs, len(placement), placement, microbatches=10**6))
    searched[0] -= 1
    searched[-1] -= 1
    assert largest(split) <= largest(searched) + 1e-6
