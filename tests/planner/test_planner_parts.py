"""The search on devices that differ, against playing everything, and what is said about them."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.predict.cost import Costs, Memories
from shoal.predict.planner import choose
from shoal.predict.planner.memory_bound import LeastMemory
from shoal.predict.planner.search import LOOSE, SLACK, Search
from shoal.predict.planner.search_cache import Shared, balanced_split
from shoal.predict.planner.space import SIZES, Space
from shoal.predict.planner.tree import Tree
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster, Device, Level, Part, every_device
from shoal.spec.plan.schedules import kind_of
from shoal.spec.workload import ModelShape, workload_of

FAST = Device(name="fast", memory=4e9, bandwidth=1e12, peak={"bf16": 1e14, "fp32": 2e13}, units=64)
SLOW = dataclasses.replace(FAST, name="slow", memory=2e9, bandwidth=8e11, peak={"bf16": 4e13, "fp32": 1e13})
SHAPE = ModelShape(layers=6, hidden=1024, ffn=4096, heads=8, kv_heads=4, vocab=32000, seq=1024)
FEW = SHAPE.replace(layers=3, kv_heads=1)
MIXED = (Part(device=FAST, devices=2), Part(device=SLOW, devices=2))
HALVES = (Part(device=FAST, devices=2), Part(device=FAST, devices=2, pace=0.5))
ONE_SLOW = (Part(device=FAST, devices=3), Part(device=FAST, devices=1, pace=0.5))


def machine(parts, network=1e10, scale=1.0):
    devices = sum(part.devices for part in parts)
    levels = (
        Level(name="links", devices=2, bandwidth=1e11),
        Level(name="network", devices=devices, bandwidth=network),
    )
    made = Cluster(name="mixed", device=FAST, levels=levels, parts=parts)
    return made.with_each_device(lambda each: dataclasses.replace(each, memory=each.memory * scale))


def every_plan(space):
    """The Plans of a space, each with its variant, sharding and split."""
    shared = Shared(space.workload, space.cluster, space.batch)
    for degrees in space.degrees():
        for variant, sharding in itertools.product(space.variants(degrees), space.shardings(degrees)):
            counts = shared.split(variant)
            yield variant, sharding, counts, shared.plan(variant, sharding, counts)


def with_buckets(plan):
    if plan.dp * plan.cp == 1 or plan.sharding.cuts_weights:
        return [plan]
    return [plan.replace(bucket=size) for size in SIZES]


@pytest.mark.parametrize("parts", [MIXED, MIXED[::-1], ONE_SLOW], ids=["mixed", "slow-first", "one-slow"])
def test_the_search_finds_what_playing_everything_finds(parts):
    workload, made = workload_of(SHAPE), machine(parts)
    ranking = Search(workload, made, 8).best(3)
    costs, memories = Costs(workload, made), Memories(workload, made)
    best = {}
    for variant, _, _, plan in every_plan(Space(workload, made, 8)):
        for each in with_buckets(plan):
            if all(rank.fits(made, 0.1) for rank in memories.of(each, 8)):
                seconds = played_seconds(costs, each, 8)
                best[variant.degrees] = min(seconds, best.get(variant.degrees, seconds))
    expected = sorted(best.values())[:3]
    assert len(ranking.candidates) == len(expected)
    slacks = [SLACK, *[LOOSE] * (len(expected) - 1)]
    for candidate, seconds, slack in zip(ranking.candidates, expected, slacks, strict=True):
        assert all(rank.fits(made, 0.1) for rank in memories.of(candidate.plan, 8))
        assert (1 - slack) * candidate.seconds <= seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [(FEW, MIXED[::-1]), (FEW.replace(experts=2, experts_per_token=1, expert_ffn=2048), ONE_SLOW)],
    ids=["dense", "experts"],
)
def test_no_branch_of_the_tree_exceeds_what_grows_from_it(shape, parts):
    shared = Shared(workload_of(shape), machine(parts, scale=2.0), 2)
    tree = Tree(shared)
    rooms = shared.space.cluster.device.memory, math.inf

    def quickest(branch):
        """The seconds of the quickest Plan that grows from a branch, for each room."""
        if branch.branches:
            grown = [min(each) for each in zip(*map(quickest, branch.branches), strict=True)]
        else:
            plan = branch.fitted(math.inf).plan
            sized = [(shared.fullest(each).required, shared.played(each)) for each in with_buckets(plan)]
            grown = [min((time for size, time in sized if size <= room), default=math.inf) for room in rooms]
        for room, seconds in zip(rooms, grown, strict=True):
            assert branch.seconds(room) <= seconds * (1 + 1e-9)
        return grown

    for degrees in tree.degrees:
        for portion in tree.portions(degrees):
            quickest(portion)


@pytest.mark.parametrize("parts", [MIXED, MIXED[::-1]], ids=["fast-first", "slow-first"])
def test_no_plan_is_smaller_than_its_bounds(parts):
    workload, made = workload_of(SHAPE), machine(parts)
    least, memories = LeastMemory(workload, made), Memories(workload, made)
    for variant, sharding, counts, plan in every_plan(Space(workload, made, 4)):
        required = memories.fullest(plan, 4).required * (1 + 1e-12)
        assert required == pytest.approx(max(each.required for each in memories.of(plan, 4)))
        states = least.states(variant.degrees, sharding, variant.layout.precision)
        for share in least.share(variant, counts), least.share_of_degrees(variant.degrees, variant.layout):
            assert least.peak(share, states) <= required
            of_states = share.dense * states.dense + share.experts * states.experts
            assert of_states <= least.for_states(share, required) * (1 + 1e-12)


def test_equal_parts_are_planned_exactly_as_a_uniform_machine():
    parts = [Part(device=FAST, devices=number) for number in (3, 1)]
    mixed = machine(tuple(parts))
    ours, theirs = (choose(workload_of(SHAPE), each, 8) for each in (mixed, every_device(mixed, FAST)))
    assert [(each.plan, each.seconds) for each in ours.candidates] == [
        (each.plan, each.seconds) for each in theirs.candidates
    ]
    assert (ours.legal, ours.played) == (theirs.legal, theirs.played)
    assert list(ours.explain().sentences()) == list(theirs.explain().sentences())


@settings(deadline=None, max_examples=150)
@given(
    st.floats(0, 5),
    st.floats(0, 5),
    st.integers(8, 24),
    st.lists(st.sampled_from((1.0, 1.3, 2.0, 3.5)), min_size=2, max_size=4),
    st.sampled_from([("1f1b", 1), ("zb-v", 2)]),
)
def test_a_split_over_unequal_devices_has_the_least_largest_rank(embedding, end, layers, paces, schedule):
    name, virtual = schedule
    ranks = len(paces)
    placement = kind_of(name).placement(ranks, virtual)
    split = balanced_split(embedding, 1.0, end, layers, placement, paces)
    assert sum(split) == layers
    fixed = [0.0] * ranks
    fixed[placement[0]] += embedding
    fixed[placement[-1]] += end
    least = [0] * ranks
    for rank in placement[1:-1]:
        least[rank] += 1
    held = [0] * ranks
    for stage, count in enumerate(split):
        held[placement[stage]] += count
    assert all(count >= low for count, low in zip(held, least, strict=True))

    def largest(counts):
        return max(pace * (x + n) for pace, x, n in zip(paces, fixed, counts, strict=True))

    every = (
        (*some, layers - sum(some))
        for some in itertools.product(*(range(low, layers + 1) for low in least[:-1]))
        if layers - sum(some) >= least[-1]
    )
    assert largest(held) == pytest.approx(min(map(largest, every)))


def test_the_explanation_says_what_slower_devices_cost_by_plans_that_were_played():
    workload, made = workload_of(SHAPE.replace(layers=8)), machine(HALVES, scale=2.0)
    choice = choose(workload, made, 12)
    told = choice.explain().unequal
    assert told.counts == {"fast": 2, "fast at 0.5 of the usual rate": 2}
    (slower,) = told.slower
    quick, fewer = every_device(made, FAST), machine(HALVES[:1], scale=2.0)
    for found, cluster in (slower.replaced, quick), (slower.without, fewer):
        costs = Costs(workload, found.cluster)
        assert found.devices == cluster.devices
        assert found.seconds == played_seconds(costs, found.plan, 12)
        assert found.seconds <= Search(workload, found.cluster, 12).best(1).best.seconds
    assert slower.replaced.seconds < choice.best.seconds
    text = " ".join(choice.explain().sentences())
    assert f"cost at least {choice.best.seconds / slower.replaced.seconds - 1:.1%}" in text
    assert ("bounds the step, and quicker devices wait" in text) == bool(told.waits)


@pytest.mark.parametrize("parts", [MIXED, MIXED[::-1]], ids=["fast-first", "slow-first"])
def test_a_pipeline_over_unequal_devices_gives_the_slower_ones_fewer_layers(parts):
    workload, made = workload_of(SHAPE.replace(layers=24, vocab=64)), machine(parts, scale=40.0)
    search = Search(workload, made, 16)
    best = search.best(1, lambda degrees: degrees.pp == 2).best
    layers = dict(zip(("first", "last"), map(len, best.costs.blocks_of(best.plan, 1)), strict=False))
    fast, slow = ("first", "last") if parts[0].device.name == "fast" else ("last", "first")
    if len(best.costs.blocks_of(best.plan, 1)) == 2:
        assert layers[slow] < 0.6 * layers[fast]
    even = best.plan.replace(split="count")
    assert best.seconds < 0.9 * played_seconds(best.costs, even, 16)


def test_slower_devices_that_are_dropped_or_quicker_change_the_advice_only_where_they_are_there():
    choice = choose(workload_of(SHAPE), every_device(machine(MIXED), FAST), 8)
    assert choice.explain().unequal is None
