"""Of a fault in forward, a comparison names the first layer that departs, and what is wrong there."""

from __future__ import annotations

import pytest
import torch
from comparison_stand_ins import SHAPE, check, make_trial, trace

from shoal.spec.plan import Mesh, Plan
from shoal.testing.check.forward import ForwardReference, first_fault
from shoal.testing.check.trace import joined

EXPERTS = {**SHAPE, "experts": 4, "expert_ffn": 32}


def departure_of(ranks, plan, fault, detail="", shape=SHAPE):
    count = Plan.parse(plan).ranks
    return ranks.run(check, count, [plan], make_trial(model_options=shape, steps=1), fault, detail)[0][
        0
    ].departure


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("cp=2", "rank 1 gives its tokens the positions 0..3, 12..15, which are those of rank 0"),
        (
            "cp=2,context=ulysses",
            "the positions 0..7, which are those of rank 0; one device has them at 8..15",
        ),
        ("cp=2,tp=2,precision=bf16", "one device has them at 4..11; so it is on ranks 2..3"),
    ],
)
def test_positions_that_are_off_by_a_shard_are_named(ranks, plan, told):
    departure = departure_of(ranks, plan, "positions_of_another_part")
    assert (departure.step, departure.layer) == (1, "rotary")
    assert told in departure.text


def test_tokens_that_no_rank_trains_on_are_named(ranks):
    departure = departure_of(ranks, "cp=2", "tokens_of_another_part")
    assert "no rank trains on the positions 4..11 of the samples of ranks 0..1" in departure.text


@pytest.mark.parametrize(
    ("plan", "rank", "tokens"),
    [
        ("dp=2,ep=2", 1, 64),
        ("dp=2,tp=2,ep=2,shard=zero3,recompute=full", 3, 32),
        ("cp=2,tp=2,precision=bf16", 3, 32),
    ],
)
def test_a_router_that_differs_is_named_with_its_layer_and_rank(ranks, plan, rank, tokens):
    departure = departure_of(ranks, plan, "a_router_of_its_own", shape=EXPERTS)
    assert departure.layer == "blocks.1.feed_forward"
    assert (
        f"the router of blocks.1.feed_forward chooses other experts on rank {rank} than one device does for "
        f"the same tokens: {tokens} of {tokens}"
    ) in departure.text


def test_a_capacity_of_another_part_is_named_with_its_layer(ranks):
    shape = {**EXPERTS, "capacity": 1.0}
    departure = departure_of(ranks, "cp=2", "choices_of_another_part", shape=shape)
    assert departure.layer == "blocks.0.feed_forward"
    assert "chooses other experts on every rank" in departure.text


def test_a_layer_whose_parts_are_not_summed_is_named(ranks):
    departure = departure_of(ranks, "tp=2,tensor=plain", "parts_that_are_not_summed", "row")
    assert departure.layer == "blocks.0.attention.output"
    assert "the first that departs, on every rank" in departure.text


def test_of_a_fault_in_backward_no_layer_is_named(ranks):
    departure = departure_of(ranks, "dp=2", "no_reduction", "replicate")
    assert departure.layer == ""
    assert "forward" not in departure.text


@pytest.mark.parametrize(
    "plan",
    [
        "cp=2,tp=2,microbatch=2",
        "cp=2,tp=2,tensor=plain,context=ulysses",
        "dp=4,ep=4,shard=zero3,recompute=full,microbatch=1",
        "dp=2,tp=2,ep=2,precision=bf16",
    ],
)
def test_no_layer_of_a_right_layout_departs(ranks, plan):
    trial, parsed = make_trial(model_options={**EXPERTS, "capacity": 1.0}), Plan.parse(plan)
    traces = ranks.run(trace, parsed.ranks, plan, trial)
    reference = ForwardReference.measure(trial, parsed.precision, torch.device("cpu"))
    assert first_fault(trial, Mesh.of(parsed), traces, reference) is None
    assert all(joined(each.forwards, ("rotary", "positions")) is not None for each in traces)
    # Of each block there is at least what it begins with, its choices and its sum.
    for block in range(SHAPE["layers"]):
        for layer, kind in (
            ("attention_norm", "output"),
            ("feed_forward", "choices"),
            ("feed_forward", "output"),
        ):
            place = (f"blocks.{block}.{layer}", kind)
            assert all(joined(each.forwards, place) is not None for each in traces)
            assert joined(traces[0].forwards, place).width == reference.forward[place].width


def test_what_recomputing_runs_again_is_not_noted(ranks):
    trial = make_trial()
    once, again = (
        ranks.run(trace, 2, f"dp=2,recompute={policy},microbatch=2", trial)[0] for policy in ("none", "full")
    )
    assert len(again.forwards) == len(once.forwards) == len(once.samples) == 2
    for first, second in zip(once.forwards, again.forwards, strict=True):
        assert list(first) == list(second)
        assert all(torch.equal(first[place].values, second[place].values) for place in first)
