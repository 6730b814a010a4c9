"""Costs and memory that were asked for many Plans, beside those of new objects: no cache forgets a field."""

import dataclasses
import random

import pytest
from random_plans import ORDERS, random_plan

from shoal.errors import ShoalError
from shoal.predict.planner.search_cache import Shared
from shoal.spec.cluster import Cluster, Part
from shoal.spec.plan import ByFields, Plan, SettledPlan
from shoal.spec.workload import ModelShape, workload_of

WORKLOAD = workload_of(ModelShape(name="small", layers=8, hidden=256, ffn=512, heads=8, vocab=512, seq=256))
BATCH = 32
UNIFORM = Cluster.preset("dgx-h100", 8)
MIXED = UNIFORM.replace(
    parts=(
        Part(device=UNIFORM.device, devices=4),
        Part(device=Cluster.preset("dgx-a100", 8).device, devices=4),
    )
)
EXCHANGES = ("", "exchange=local", "exchange=local,every=50", "exchange=server,servers=2", "compress=int8")
CHANGES = [
    *({"recompute": each} for each in ("none", "full", "full:2", "full:4", "selective:2")),
    *({"shard": each} for each in ("none", "zero1", "zero2", "zero3", "zero3-once")),
    *({"schedule": each, "virtual": None} for each in ("1f1b", "gpipe", "zb-h1")),
    *({"split": each} for each in ("cost", "count", "1-7", "5-3", "1-2-2-3")),
    *({"exchange": "local", "every": each} for each in (5, 500)),
    *({"offload": each} for each in ("optimizer:host", "device")),
    *({"bucket": each} for each in (1 << 20, 1 << 28)),
    *({"microbatch": each} for each in (1, 2)),
    *({"replicate": each} for each in (1, 2)),
    *({"compile": each} for each in ("blocks", "none")),
    *({"precision": each} for each in ("fp32", "bf16")),
    {"reduce": "bf16"},
    {"compress": "int8"},
    {"tensor": "plain"},
    {"context": "ulysses"},
    {"order": "dp-tp-cp-pp"},
]
"""What Plans are changed by, so that some differ in one field alone."""

ASKED = {
    "least": lambda shared, plan, count: shared.costs.least(plan, BATCH),
    "least_of_sizes": lambda shared, plan, count: shared.costs.least_of_sizes(plan, BATCH),
    "least_of_passes": lambda shared, plan, count: shared.costs.least_of_passes(plan, count),
    "stages": lambda shared, plan, count: shared.costs.stages(plan, count),
    "update_of": lambda shared, plan, count: shared.costs.update_of(plan, count),
    "offload": lambda shared, plan, count: shared.costs.offload(plan, 0, count),
    "sends": lambda shared, plan, count: shared.costs.sends(plan),
    "norm": lambda shared, plan, count: shared.costs.norm(plan),
    "blocks_of": lambda shared, plan, count: shared.costs.blocks_of(plan, count),
    "paces": lambda shared, plan, count: shared.costs.paces(plan),
    "send": lambda shared, plan, count: shared.costs.send(plan, 0, plan.pp - 1),
    "fullest": lambda shared, plan, count: shared.memories.fullest(plan, BATCH),
    "beside_states": lambda shared, plan, count: shared.memories.beside_states(plan, BATCH),
    "played_passes": lambda shared, plan, count: shared.played_passes(plan),
}


def enumerated(cluster, chance, number):
    """Return some of the Plans that a planner looks at."""
    shared = Shared(WORKLOAD, cluster, BATCH)
    variants = [each for degrees in shared.space.degrees() for each in shared.space.variants(degrees)]
    return [
        shared.plan(variant, chance.choice(shared.space.shardings(variant.degrees)), shared.split(variant))
        for variant in chance.sample(variants, number)
    ]


def changed(plan, changes):
    """Return the Plan with some changes; the Plan itself if it does not take them."""
    try:
        return SettledPlan.of(plan.replace(**changes), BATCH)
    except ShoalError:
        return plan


def answer(name, shared, plan):
    """Return what a question gives, to the last bit."""
    try:
        return repr(ASKED[name](shared, plan, plan.microbatches_of(BATCH)))
    except ShoalError as error:
        return type(error).__name__


@pytest.mark.parametrize("cluster", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_costs_that_were_asked_for_other_plans_are_those_of_new_ones(cluster):
    chance = random.Random(1)
    drawn = [
        random_plan(chance, WORKLOAD, 8, BATCH, pipelines=pipelines, orders=ORDERS[:4], exchanges=EXCHANGES)
        for pipelines in (False, True, True)
    ]
    plans = {}
    for plan in (*drawn, *enumerated(cluster, chance, 5)):
        plans |= dict.fromkeys([plan, *(changed(plan, each) for each in CHANGES)])
    warm = Shared(WORKLOAD, cluster, BATCH)
    asked = [(name, plan) for name in ASKED for plan in plans]
    chance.shuffle(asked)
    answers = {each: answer(each[0], warm, each[1]) for each in asked}
    for plan in plans:
        new = Shared(WORKLOAD, cluster, BATCH)
        for name in ASKED:
            assert answers[name, plan] == answer(name, new, plan), (name, str(plan))


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Plan)])
def test_a_cache_by_fields_tells_apart_plans_that_differ_in_any_field_that_is_read(field):
    plan = SettledPlan(microbatch=1)
    others = {"dp": 2, "microbatch": 2, "shares": "2x1", "split": "count", "order": "dp-pp-cp-tp"}
    other = plan.replace()
    object.__setattr__(other, field, others.get(field, "another"))  # whether it is legal or not
    known = ByFields(lambda plan, more: (getattr(plan, field), more))
    assert known(plan, 0) == (getattr(plan, field), 0)
    assert known(other, 0) == (getattr(other, field), 0)
    assert known(other, 1) == (getattr(other, field), 1)


def test_a_cache_by_fields_calls_its_function_once_for_plans_that_are_equal_in_what_is_read():
    calls = []

    def read(plan):
        calls.append(plan)
        return plan.bucket if plan.shard == "zero2" else 0

    known = ByFields(read)
    inner = ByFields(lambda plan: known(plan) + plan.tp)
    none, other = SettledPlan(microbatch=1), SettledPlan(microbatch=1, dp=2, bucket=1 << 20)
    assert [known(each) for each in (none, other, none)] == [0, 0, 0]
    assert len(calls) == 1
    cut = other.replace(shard="zero2")  # here the bucket is read, and from now on it is in the key
    assert [known(each) for each in (cut, cut, cut.replace(bucket=1 << 21), cut)] == [
        1 << 20,
        1 << 20,
        1 << 21,
        1 << 20,
    ]
    assert len(calls) == 3
    assert [inner(each) for each in (cut, cut.replace(bucket=1 << 21))] == [(1 << 20) + 1, (1 << 21) + 1]
