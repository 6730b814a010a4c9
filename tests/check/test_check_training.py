"""A comparison passes layouts that compute the same, and names what others do wrong."""

from __future__ import annotations

import math

import pytest
import torch
from comparison_stand_ins import SHAPE, check, groups_after_plans, make_trial

from shoal.data import Loader
from shoal.errors import ConfigError, ModelError
from shoal.spec.plan import Plan
from shoal.spec.plan.enumerate import legal_plans
from shoal.testing.check import Tolerance
from shoal.testing.check.distributed import Fragment, copies
from shoal.testing.check.reference import Reference, Sums, relative, vector_deviation
from shoal.testing.check.trial import OPTIMIZER


def verdict_of(ranks, plan, fault="", detail="", **changes):
    count = Plan.parse(plan).ranks
    return ranks.run(check, count, [plan], make_trial(**changes), fault, detail)[0][0]


@pytest.mark.parametrize("count", [2, 4])
def test_every_data_parallel_plan_computes_what_one_device_does(ranks, count):
    plans = [
        str(plan.replace(microbatch=1))
        for plan in legal_plans(count, varied={"shard": ("none", "zero1", "zero3")})
        if plan.dp == count and plan.ep == 1 and plan.replicate < count
    ]
    for rank, verdicts in enumerate(ranks.run(check, count, plans, make_trial())):
        for verdict in verdicts:
            assert (verdict is None) == (rank > 0)
            if verdict is not None:
                assert verdict.outcome == "passed", verdict
                assert len(verdict.steps) == 3


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1,microbatch=2",
        "dp=2,exchange=naive",
        "dp=2,recompute=full",
        "tp=2,shard=zero1",
        "cp=2,shard=zero3",
        "dp=2,tp=2,tensor=plain",
        "dp=4,shares=3-1-3-1",
        "dp=2,cp=2,shard=zero1,shares=1-3",
        "dp=3,shard=zero2,shares=1-2-1",  # ranks are padded, here and below
        "dp=4,replicate=2,shard=zero3,recompute=full,shares=3-1-3-1",
        "dp=2,pp=2,schedule=zb-h1,shares=5-3",
    ],
)
def test_other_choices_of_a_plan_do_too(ranks, plan):
    verdict = verdict_of(ranks, plan)
    assert verdict.outcome == "passed", verdict


def test_stages_are_cut_for_the_most_micro_batches_of_a_rank(ranks):
    """Interleaved stages take an even number of them, and 10 samples on two ranks make five on average."""
    shape = {**SHAPE, "layers": 4}
    verdict = verdict_of(ranks, "dp=2,pp=2,schedule=interleaved,shares=6-4", model_options=shape, batch=10)
    assert verdict.outcome == "passed", verdict


@pytest.mark.parametrize("plan", ["dp=2,microbatch=2", "dp=2,ep=2,shard=zero3", "dp=2,shares=1-3"])
def test_experts_and_their_balance_are_part_of_what_is_compared(ranks, plan):
    shape = {**SHAPE, "experts": 4, "experts_per_token": 2, "balance_weight": 0.1}
    verdict = verdict_of(ranks, plan, model="tiny-experts", model_options=shape)
    assert verdict.outcome == "passed", verdict
    # The balance loss is of each sample, so that micro-batches change nothing but the order of sums.
    assert max(step.gradients.bound for step in verdict.steps) < 1e-3


@pytest.mark.parametrize("plan", ["dp=2,microbatch=2", "dp=1,tp=2", "dp=1,cp=2"])
def test_dropout_is_part_of_what_is_compared(ranks, plan):
    with_dropout = make_trial(model_options={**SHAPE, "dropout": 0.3})
    verdict = ranks.run(check, 2, [plan], with_dropout)[0][0]
    assert verdict.outcome == "passed", verdict
    losses = [
        Tolerance.measure(each, "fp32", torch.device("cpu")).steps[0].loss
        for each in (with_dropout, make_trial())
    ]
    assert losses[0] != losses[1]


def test_bf16_is_held_against_bf16_on_one_device(ranks):
    verdict = verdict_of(ranks, "dp=2,shard=zero1,precision=bf16,microbatch=2")
    assert verdict.outcome == "passed"
    assert verdict.steps[0].gradients.bound > 100 * verdict_of(ranks, "dp=2").steps[0].gradients.bound


@pytest.mark.parametrize(
    ("plan", "axis"),
    [
        ("dp=2", "replicate"),
        ("dp=2,shard=zero1,microbatch=2", "shard"),
        ("dp=2,shard=zero3", "shard"),
        ("dp=4,replicate=2,shard=zero2", "shard"),
        ("dp=4,replicate=2,shard=zero3", "replicate"),
    ],
)
def test_a_missing_reduction_is_named_with_its_axis(ranks, plan, axis):
    departure = verdict_of(ranks, plan, "no_reduction", axis).departure
    assert (departure.step, departure.quantity, departure.name) == (1, "gradient", "embed.weight")
    assert f"it is not summed over the axis {axis}" in departure.text


@pytest.mark.parametrize(
    ("plan", "axis", "told"),
    [
        ("dp=2", "replicate", "it is 2 times the reference: a sum in place of a mean over replicate"),
        ("dp=4,shard=zero2", "shard", "it is 4 times the reference: a sum in place of a mean over shard"),
    ],
)
def test_a_sum_in_place_of_a_mean_is_named(ranks, plan, axis, told):
    departure = verdict_of(ranks, plan, "sum_in_place_of_mean", axis).departure
    assert (departure.step, departure.quantity, departure.name) == (1, "gradient", "embed.weight")
    assert told in departure.text


@pytest.mark.parametrize("plan", ["dp=2,shard=zero1", "dp=4,replicate=2,shard=zero3"])
def test_a_norm_of_a_shard_is_named(ranks, plan):
    departure = verdict_of(ranks, plan, "norm_of_a_shard").departure
    assert (departure.step, departure.quantity) == (1, "gradient norm")
    assert "though every gradient agrees" in departure.text
    assert "the ranks have different norms" in departure.text


@pytest.mark.parametrize("plan", ["dp=2,microbatch=2", "dp=2,shard=zero3"])
def test_a_duplicated_and_a_dropped_sample_are_named(ranks, plan):
    departure = verdict_of(ranks, plan, "other_samples", "twice").departure
    assert (departure.step, departure.quantity) == (1, "samples")
    assert "dropped: " in departure.text
    assert "duplicated: " in departure.text


def test_data_that_stand_still_are_named_in_the_step_after(ranks):
    departure = verdict_of(ranks, "dp=2", "other_samples", "stale").departure
    assert (departure.step, departure.quantity) == (2, "samples")
    assert "from another step: " in departure.text


def test_weights_that_are_not_gathered_show_in_the_evaluation_after_the_step(ranks):
    verdict = verdict_of(ranks, "dp=2,shard=zero1", "stale_weights")
    assert not verdict.steps[0].parameters.departs
    assert (verdict.departure.step, verdict.departure.quantity) == (1, "evaluation")


def test_a_replica_with_another_gradient_is_named_with_parameter_axis_and_rank(ranks):
    departure = verdict_of(ranks, "dp=2", "a_rank_of_its_own").departure
    assert (departure.step, departure.quantity) == (1, "gradient")
    assert departure.name == "blocks.1.feed_forward.up.weight"
    assert "ranks along the axis replicate hold different values" in departure.text
    assert "it departs only on rank 1" in departure.text


def test_an_optimizer_with_another_rate_is_named_with_its_rank(ranks):
    departure = verdict_of(ranks, "dp=2,shard=zero1", "a_learning_rate_of_its_own").departure
    assert (departure.step, departure.quantity) == (1, "parameter")
    assert "it departs only on rank 1" in departure.text


def test_what_tensor_parallelism_leaves_whole_and_does_not_sum_is_named(ranks):
    departure = verdict_of(ranks, "tp=2", "no_reduction", "replicate").departure
    assert (departure.step, departure.quantity) == (1, "gradient")
    assert departure.name == "blocks.0.attention_norm.weight"
    assert "ranks along the axis tp hold different values" in departure.text


def test_gradients_that_context_parallelism_does_not_sum_are_named(ranks):
    departure = verdict_of(ranks, "cp=2", "no_reduction", "replicate").departure
    assert (departure.step, departure.quantity) == (1, "gradient")
    assert "ranks along the axis cp hold different values" in departure.text


def test_experts_that_are_not_summed_are_named_with_their_axis(ranks):
    shape = {**SHAPE, "experts": 4, "expert_ffn": 32}
    verdict = verdict_of(ranks, "dp=4,ep=2", "no_reduction", "replicate", model_options=shape)
    assert "it is not summed over the axis replicate" in verdict.departure.text


def test_a_plan_that_does_not_fit_the_batch_is_refused_with_the_reason(ranks):
    verdict = verdict_of(ranks, "dp=2,microbatch=3")
    assert verdict.outcome == "refused"
    assert "microbatch=3" in verdict.reason


def test_groups_of_a_plan_do_not_stay(ranks):
    plans = ["dp=4,replicate=2,shard=zero3", "dp=4,shard=zero1", "dp=4"] * 2
    for counts in ranks.run(groups_after_plans, 4, plans, make_trial()):
        assert counts == [1] * len(plans)


def test_the_reference_is_the_plainest_loop():
    """Against a loop written out here, in the same type: equal but for sums that fused kernels order anew."""
    trial = make_trial(steps=2)
    steps = Reference(trial, Sums(torch.float32, torch.float32, trial.batch), torch.device("cpu")).run()
    model = trial.build_with_values("cpu")
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=OPTIMIZER.learning_rate,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    loader = Loader(trial.samples(model), seed=trial.seed, batch_size=trial.batch)
    for number, step in enumerate(steps):
        inputs, targets = next(loader.microbatches(number * trial.batch, 0, 1, trial.batch))
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        optimizer.zero_grad()
        assert step.loss == pytest.approx(loss.item(), rel=1e-6)
        assert step.norm == pytest.approx(norm.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(step.parameters[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_bounds_are_far_below_what_a_fault_does():
    for bounds in Tolerance.measure(make_trial(), "fp32", torch.device("cpu")).bounds:
        # a dropped sample of eight moves a gradient by about an eighth
        assert 0 < max(bounds.gradients.values()) < 1e-3
        assert 0 < bounds.loss < 1e-4


def test_what_is_no_number_is_infinitely_far():
    missing = torch.tensor([1.0, math.nan])
    assert relative(math.nan, 1.0) == relative(1.0, math.nan) == math.inf
    assert vector_deviation(missing, torch.ones(2), 1.0) == math.inf
    assert vector_deviation(torch.ones(2), missing, 1.0) == math.inf


def test_copies_are_put_together_from_blocks_along_any_dim():
    whole = torch.arange(24.0).view(4, 6)
    fragments = []
    for rank in range(4):  # columns cut in two, each block cut in two at an element; two ranks hold each half
        block = whole[:, rank // 2 * 3 : rank // 2 * 3 + 3].flatten()
        start, stop = ((0, 5), (5, 12))[rank % 2]
        fragments.append((rank, Fragment("w", (4, 6), (1, rank // 2 * 3, 3), start, stop, block[start:stop])))
    first, second = copies([*fragments, *((rank + 4, fragment) for rank, fragment in fragments)])["w"]
    assert first.ranks == (0, 1, 2, 3)
    assert second.ranks == (4, 5, 6, 7)
    torch.testing.assert_close(first.values, whole.double())
    missing = copies(fragments[:3])["w"][0]
    assert math.isnan(missing.values[3, 5])


@pytest.mark.parametrize("change", [{"steps": 0}, {"batch": 0}, {"sequence": 0}, {"seed": -1}])
def test_numbers_that_cannot_be_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        make_trial(**change)


def test_a_sequence_beyond_the_models_context_is_refused():
    with pytest.raises(ModelError, match="sequence=64"):
        make_trial(sequence=64).require_possible()
