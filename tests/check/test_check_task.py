"""A comparison takes models with inputs and a loss of their own, and those of the zoo."""

import contextlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from comparison_stand_ins import check

from shoal.errors import ConfigError, ModelError, PlanError
from shoal.models import Task
from shoal.spec.plan import Plan
from shoal.testing.check import TaskTrial, Tolerance, Trial, trial_of
from shoal.testing.zoo import ENTRIES

ZOO = "shoal.testing.zoo:"


def trial(entry, **changes):
    sizes = {"batch": None, "sequence": None} | changes
    return trial_of(f"{ZOO}{entry}", {}, sizes=sizes, default_batch=8, steps=2, seed=0)


@pytest.mark.parametrize("entry", [name for name in ENTRIES if name != "sparse_embedding"])
def test_an_entry_of_the_zoo_is_measured_on_one_device(entry):
    if entry.startswith("hf_"):
        pytest.importorskip("transformers")
    for precision, rounding in (("fp32", 1e-4), ("bf16", 0.5)):
        measured = Tolerance.measure(trial(entry), precision, torch.device("cpu"), 4)
        assert 0.0 < measured.bounds[0].loss < rounding
        assert measured.bounds[0].norm < rounding


@pytest.mark.parametrize(
    ("entry", "plan"),
    [
        ("batch_norm", "dp=2,shard=zero3,microbatch=4"),
        ("batch_norm_2d", "dp=2,microbatch=2"),
        ("two_forwards", "dp=2,shard=zero2,precision=bf16,microbatch=4"),
        ("nested_inputs", "dp=2,shard=zero1"),
        ("lora", "dp=4,replicate=2,shard=zero3"),
        ("recompute", "dp=2,shard=zero3"),
        ("spectral_norm", "dp=2,shard=zero1,microbatch=4"),
        ("spectral_norm", "dp=2,shard=zero1,shares=1-3"),
        ("one_rank_parameters", "dp=2,shard=zero2,microbatch=4"),
    ],
)
def test_an_entry_of_the_zoo_computes_under_a_plan_what_one_device_does(ranks, entry, plan):
    verdict = ranks.run(check, Plan.parse(plan).ranks, [plan], trial(entry))[0][0]
    assert verdict.outcome == "passed", verdict
    assert len(verdict.steps) == 2


def test_a_missing_reduction_is_named_for_a_task_too(ranks):
    verdict = ranks.run(check, 2, ["dp=2,shard=zero1"], trial("no_list"), "no_reduction", "shard")[0][0]
    assert verdict.outcome == "failed"
    assert "it is not summed over the axis shard" in verdict.departure.text


def check_resumed(entry, loads=True):
    """The verdict on a training that is saved and loaded again before its second step."""
    resumed = replace(trial(entry), resumed_before=1, dropout=True)
    fault = contextlib.nullcontext() if loads else patch("shoal.testing.check.runner.load")
    with fault:
        return check(["dp=2,shard=zero2,microbatch=4"], resumed)[0]


def test_a_state_that_is_not_loaded_departs_at_the_next_step(ranks):
    assert ranks.run(check_resumed, 2, "dropout")[0].outcome == "passed"
    verdict = ranks.run(check_resumed, 2, "dropout", False)[0]
    assert (verdict.outcome, verdict.departure.step) == ("failed", 2)


def test_running_statistics_are_those_of_the_first_rank_on_one_device():
    steps = [
        Tolerance.measure(trial("batch_norm"), "fp32", torch.device("cpu"), 4, each).steps for each in (2, 4)
    ]
    two, four = ([step.buffers for step in each] for each in steps)
    assert int(two[0]["1.1.num_batches_tracked"]) == 2
    assert int(four[0]["1.1.num_batches_tracked"]) == 1


def nothing_to_train():
    return Task(
        build=torch.nn.Identity, batch=lambda number: {"x": 3}, loss=lambda model, batch: model(batch)
    )


def test_a_model_that_takes_tokens_is_no_task():
    sizes = {"batch": None, "sequence": 16}
    made = trial_of("tiny", {}, sizes=sizes, default_batch=4, steps=1, seed=0)
    assert isinstance(made, Trial)
    assert (made.batch, made.sequence) == (4, 16)
    assert isinstance(trial("lora"), TaskTrial)


def test_what_a_task_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="batches of 16 samples"):
        trial("lora", batch=4)
    with pytest.raises(ConfigError, match="sequence=4"):
        trial("lora", sequence=4)
    require = trial("lora").require_possible()
    with pytest.raises(PlanError, match="cp=2 was given"):
        require(Plan.parse("cp=2"))
    with pytest.raises(PlanError, match="does not divide"):
        require(Plan.parse("dp=3"))
    sizes = {"batch": None, "sequence": None}
    with pytest.raises(ModelError, match="holds no tensor with samples"):
        trial_of(f"{__name__}:nothing_to_train", {}, sizes=sizes, default_batch=4, steps=1, seed=0)
