"""What a batch may be, and what of it counts: however it is laid out, a step is that of one device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from batch_stand_ins import (
    SEQUENCE,
    Inputs,
    causal_by_hand,
    refusal,
    trained_causally,
    trained_on_dataclasses,
    trained_on_mappings,
    trained_on_masked,
    trained_on_nothing,
)

from shoal.models.task import map_tensors, tensors_in
from shoal.spec.plan import Plan

# fp32 sums in another order, which AdamW's division enlarges.
CLOSE = {"rel": 1e-4}


def ranks_of(plan):
    return Plan.parse(plan).ranks


@pytest.fixture(scope="module")
def one_device():
    return trained_on_masked("dp=1,microbatch=8")


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1,microbatch=1",
        "dp=2,microbatch=1",
        "dp=2,shard=zero3,microbatch=1",
        "dp=2,shard=zero2,microbatch=2",
        "dp=3,shard=zero1,shares=1-5-2",
        "dp=3,shard=zero3,shares=1-5-2",
        "dp=2,pp=2,shares=3-5",
        "cp=2,microbatch=1",
        "dp=2,tp=2,microbatch=1",
        "dp=2,pp=2,microbatch=1",
    ],
)
def test_masked_targets_are_weighed_by_those_that_count_in_the_whole_batch(ranks, one_device, plan):
    """Some micro-batches have none that do, and a loss of them whose own gradient would be NaN."""
    results = ranks.run(trained_on_masked, ranks_of(plan), plan)
    for result in results:
        assert result["skipped"] == ["", ""]
        assert result["losses"] == pytest.approx(one_device["losses"], **CLOSE)
        assert result["norms"] == pytest.approx(one_device["norms"], **CLOSE)
        assert result["validated"] == pytest.approx(one_device["validated"], **CLOSE)
    found = results[0]["weights"]
    for name, value in one_device["weights"].items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2,shard=zero1,microbatch=2"])
def test_a_batch_of_which_nothing_counts_is_skipped(ranks, plan):
    for losses, skipped, same in ranks.run(trained_on_nothing, ranks_of(plan), plan):
        assert all(map(math.isnan, losses))
        assert all("no target of the batch counts" in reason for reason in skipped)
        assert same


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("plan", ["dp=2,microbatch=1", "dp=2,shard=zero1,microbatch=4"])
def test_a_mapping_goes_to_the_model_by_keywords_and_the_loss_is_the_outputs_or_the_given_one(
    ranks, plan, with_loss
):
    expected = trained_on_mappings("dp=1,microbatch=8", with_loss=False)
    for result in ranks.run(_on_mappings, ranks_of(plan), plan, with_loss):
        assert result["losses"] == pytest.approx(expected["losses"], **CLOSE)
        assert result["values"] == pytest.approx(expected["values"], **CLOSE)
        assert result["values"].keys() == {"loss", "accuracy"}


def _on_mappings(plan, with_loss):
    return trained_on_mappings(plan, with_loss=with_loss)


def test_a_dataclass_of_nested_tensors_goes_to_the_model_as_it_is(ranks):
    expected = trained_on_dataclasses("dp=1,microbatch=8")
    for losses in ranks.run(trained_on_dataclasses, 2, "dp=2,shard=zero1,microbatch=2"):
        assert losses == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize(
    "plan", ["dp=1,microbatch=8", "dp=2,microbatch=1", "dp=2,pp=2,microbatch=1", "cp=2,microbatch=2"]
)
def test_a_causal_model_of_hugging_face_has_its_own_loss_of_labels_under_every_plan(ranks, plan):
    pytest.importorskip("transformers")
    expected = causal_by_hand()
    for losses in ranks.run(trained_causally, ranks_of(plan), plan):
        assert losses == pytest.approx(expected, **CLOSE)


def test_a_batch_that_the_model_does_not_take_is_refused_by_name():
    error = refusal()
    assert error.startswith("ModelError: Linear cannot be called with what the batch holds (input_ids, ")
    assert "Linear.forward(input" in error


def masked_causally(plan):
    """The first tokens of every sample are padding, which no other token sees."""
    return trained_causally(plan, attention_mask=(torch.arange(SEQUENCE) >= 2).long())


def causally_beside(plan):
    """An input that the model's forward does not name, and takes."""
    return trained_causally(plan, beside=torch.ones(1))


def test_an_input_that_the_forward_takes_without_its_name_travels_too(ranks):
    pytest.importorskip("transformers")
    for losses in ranks.run(causally_beside, 2, "pp=2,microbatch=2"):
        assert losses == pytest.approx(causal_by_hand(), **CLOSE)


def test_several_inputs_travel_with_a_micro_batch_through_a_pipeline(ranks):
    pytest.importorskip("transformers")
    expected = masked_causally("dp=1,microbatch=8")
    assert expected != pytest.approx(trained_causally("dp=1,microbatch=8"), **CLOSE)
    for losses in ranks.run(masked_causally, 2, "pp=2,microbatch=2"):
        assert losses == pytest.approx(expected, **CLOSE)


@dataclass
class Leaf:
    tensor: torch.Tensor
    name: str


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_tensors_are_found_and_changed_wherever_they_are():
    one, two, three, four = (torch.tensor(float(number)) for number in range(1, 5))
    nested = {"a": [Leaf(one, "one"), 7], "b": (Point(two, three), None, Inputs(four, {}))}
    assert [float(tensor) for tensor in tensors_in(nested)] == [1, 2, 3, 4]
    doubled = map_tensors(lambda tensor: tensor * 2, nested)
    assert [float(tensor) for tensor in tensors_in(doubled)] == [2, 4, 6, 8]
    assert doubled["a"][0].name == "one"
    assert isinstance(doubled["b"][0], Point)
    assert float(one) == 1
