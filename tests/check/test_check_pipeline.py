"""A comparison passes pipelines that compute what one device does, and names what others do wrong."""

from __future__ import annotations

import pytest
import torch
from comparison_stand_ins import SHAPE, check, make_trial, trace

from shoal.spec.plan import Mesh, Plan
from shoal.spec.plan.schedules import NAMES
from shoal.testing.check.forward import ForwardReference, first_fault
from shoal.testing.check.trace import joined

FOUR, EIGHT = {**SHAPE, "layers": 4}, {**SHAPE, "layers": 8}
UNTIED = {"tie_embeddings": False}
EXPERTS = {**FOUR, "experts": 4, "expert_ffn": 32}


def verdicts_of(ranks, plans, shape, fault="", detail="", **changes):
    trial = make_trial(**{"model_options": shape, "steps": 2, **changes})
    return ranks.run(check, Plan.parse(plans[0]).ranks, plans, trial, fault, detail)[0]


def departure_of(ranks, plan, fault, detail="", shape=FOUR, **changes):
    return verdicts_of(ranks, [plan], shape, fault, detail, **{"steps": 1, **changes})[0].departure


def require_passed(verdicts):
    for verdict in verdicts:
        assert verdict.outcome == "passed", verdict


SCHEDULES = [*NAMES, "looped-bfs,virtual=2", "search", "search,virtual=2"]
TWO_RANKS = [f"pp=2,schedule={name}" for name in SCHEDULES[::2]]
FOUR_RANKS = [f"pp=4,schedule={name}" for name in SCHEDULES[1::2]]


def test_schedules_on_two_ranks_compute_what_one_device_does(ranks):
    require_passed(verdicts_of(ranks, TWO_RANKS, {**FOUR, **UNTIED}))


def test_schedules_on_four_ranks_compute_what_one_device_does(ranks):
    require_passed(verdicts_of(ranks, FOUR_RANKS, {**EIGHT, "tie_embeddings": True}, steps=1))


def test_bf16_in_a_pipeline_is_held_against_bf16_on_one_device(ranks):
    plans = [f"pp=2,schedule={name},precision=bf16" for name in ("1f1b", "zb-v")]
    require_passed(verdicts_of(ranks, plans, FOUR))


def test_pipelines_compose_on_four_ranks(ranks):
    plans = [
        "dp=2,pp=2,shard=zero3,schedule=zb-h1",
        "tp=2,pp=2,schedule=interleaved,recompute=full",
        "cp=2,pp=2,shard=zero2,schedule=dualpipe-v",
    ]
    require_passed(verdicts_of(ranks, plans, {**FOUR, **UNTIED, "dropout": 0.1}))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_experts_in_a_pipeline_are_those_of_one_device(ranks, schedule):
    require_passed(verdicts_of(ranks, [f"dp=2,pp=2,ep=2,schedule={schedule}"], EXPERTS))


def test_three_axes_on_eight_ranks_compute_what_one_device_does(ranks):
    require_passed(verdicts_of(ranks, ["dp=2,tp=2,pp=2,shard=zero3,schedule=zb-h1"], FOUR))


@pytest.mark.parametrize(
    ("plan", "stage", "where"),
    [
        ("pp=2", 1, "rank 0, 1, at 0, 1"),
        ("pp=2,schedule=zb-h1", 0, "rank 0, at 0"),
        ("dp=2,pp=2,shard=zero3", 1, "rank 0, 1, 2, 3, at 0, 1"),
        ("pp=4", 2, "rank 0, 1, 2, at 0, 1, 2"),
        ("pp=2,precision=bf16", 0, "rank 0, at 0"),
    ],
)
def test_a_dropped_micro_batch_is_named_with_the_ranks_that_lack_it(ranks, plan, stage, where):
    departure = departure_of(ranks, plan, "dropped_backward", str(stage), {**FOUR, **UNTIED})
    assert (departure.step, departure.quantity) == (1, "gradient")
    assert "the gradient of micro-batch 1 (sample " in departure.text
    assert f"is missing; the fault is on {where} along pp" in departure.text


def test_a_micro_batch_that_counts_twice_is_named(ranks):
    departure = departure_of(ranks, "pp=2", "backward_twice", "0", {**FOUR, **UNTIED})
    assert "the gradient of micro-batch 1 (sample " in departure.text
    assert "is counted twice; the fault is on rank 0, at 0 along pp" in departure.text


@pytest.mark.parametrize(
    ("plan", "rank", "stage", "shape"),
    [
        ("pp=2", 1, 1, FOUR),
        ("pp=2,schedule=zb-v", 1, 1, FOUR),
        ("pp=4,schedule=interleaved", 2, 6, EIGHT),
        ("tp=2,pp=2,recompute=full", 2, 1, FOUR),
    ],
)
def test_a_stale_activation_is_named_with_layer_rank_and_micro_batch(ranks, plan, rank, stage, shape):
    departure = departure_of(ranks, plan, "stale_activation", str(stage), shape)
    assert (departure.step, departure.quantity) == (1, "gradient")
    assert departure.layer.endswith("attention_norm")
    assert f"on rank{'s' if 'tp' in plan else ''} {rank}" in departure.text
    assert "for micro-batch 1 it is what one device gives for micro-batch 0" in departure.text


@pytest.mark.parametrize("plan", ["pp=2", "pp=4", "pp=2,schedule=interleaved"])
def test_a_block_in_no_stage_is_named(ranks, plan):
    departure = departure_of(ranks, plan, "wrong_split", "left out", EIGHT)
    assert "stages: no rank runs blocks." in departure.text
    assert departure.layer.startswith("blocks.")


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,schedule=interleaved"])
def test_a_block_in_two_stages_is_named(ranks, plan):
    departure = departure_of(ranks, plan, "wrong_split", "twice", EIGHT)
    assert "runs on ranks 0..1, one after the other" in departure.text


@pytest.mark.parametrize(("plan", "stage", "name"), [("pp=2", 0, "query"), ("pp=4", 3, "query")])
def test_a_lost_weight_gradient_is_named(ranks, plan, stage, name):
    departure = departure_of(
        ranks, f"{plan},schedule=zb-h1", "lost_weight_gradient", str(stage), {**FOUR, **UNTIED}
    )
    assert departure.name.endswith(f"attention.{name}.weight")
    assert f"is missing; the fault is on rank {stage}, at {stage} along pp" in departure.text
    assert "norm" not in departure.text


@pytest.mark.parametrize("plan", ["pp=2", "pp=4,schedule=zb-h1", "dp=2,pp=2,shard=zero1"])
def test_a_tied_gradient_that_is_not_added_up_is_named(ranks, plan):
    departure = departure_of(ranks, plan, "ends_not_added_up")
    assert (departure.step, departure.name) == (1, "embed.weight")
    last = Plan.parse(plan).pp - 1
    assert f"the ranks at 0, {last} along pp hold gradients whose sum is right" in departure.text


def test_other_samples_on_a_stage_are_named(ranks):
    departure = departure_of(ranks, "dp=2,pp=2", "samples_of_its_own")
    assert departure.quantity == "samples"
    assert "rank 3 trains on other samples than other ranks at the same place along dp" in departure.text


def test_the_order_of_samples_on_a_stage_counts(ranks):
    departure = departure_of(ranks, "pp=2", "samples_of_its_own")
    assert departure.quantity == "samples"
    assert "rank 1 trains in another order than other ranks at the same place along dp" in departure.text


@pytest.mark.parametrize(
    ("plan", "shape"),
    [
        ("pp=2,schedule=zb-v", FOUR),
        ("pp=4,schedule=interleaved", EIGHT),
        ("dp=2,pp=2,schedule=looped-bfs,recompute=full", FOUR),
        ("tp=2,pp=2,ep=1,precision=bf16", EXPERTS),
    ],
)
def test_no_layer_of_a_right_pipeline_departs(ranks, plan, shape):
    trial, parsed = make_trial(model_options=shape), Plan.parse(plan)
    traces = ranks.run(trace, parsed.ranks, plan, trial)
    reference = ForwardReference.measure(trial, parsed.precision, torch.device("cpu"))
    assert first_fault(trial, Mesh.of(parsed), traces, reference) is None
    # Every block was seen by the ranks of one stage, for every micro-batch.
    for block in range(shape["layers"]):
        place = (f"blocks.{block}", "output")
        found = [rank for rank, each in enumerate(traces) if joined(each.forwards, place) is not None]
        assert len({Mesh.of(parsed).coordinate(rank, "pp") for rank in found}) == 1
        samples = trial.batch // parsed.dp
        assert all(len(joined(traces[rank].forwards, place).values) == samples for rank in found)
