"""The Trainer on ranks: what a run computes depends on neither its layout nor its interruptions."""

from __future__ import annotations

import collections
from statistics import fmean

import pytest
import torch
from train_stand_ins import (
    BATCH,
    SAMPLES,
    SHAPE,
    STEPS,
    NotingLoss,
    loss_of_each_sample,
    losses_of,
    make_trainer,
    resume_half_way,
    save_half_way,
    train_into_a_loss_that_is_not_finite,
    validated,
    with_and_without_interruption,
)

from shoal.errors import CheckpointError, PlanError
from shoal.spec.plan import Plan

SHARDS = ("none", "zero1", "zero2", "zero3", "zero3-once")
LAYOUTS = [f"dp={ranks},shard={shard},microbatch=2" for ranks in (1, 2) for shard in SHARDS]
HYBRID = "dp=4,replicate=2,shard=zero3"

# fp32 sums in another order give losses that differ by rounding, which AdamW's division by the root of
# small squares enlarges; the same bound as for the layouts of tests/parallel.
CLOSE = {"rel": 1e-4}


@pytest.fixture(scope="module")
def plain():
    """The losses of one process without sharding or accumulation."""
    return losses_of("dp=1")


def ranks_of(plan):
    return Plan.parse(plan).ranks


WITHIN_LAYERS = ["tp=2", "cp=2,shard=zero2", "dp=2,tp=2,shard=zero3,tensor=plain"]


@pytest.mark.parametrize(
    "plan",
    [
        *LAYOUTS,
        HYBRID,
        "dp=2,shard=zero1,shares=3-1",
        "dp=2,shard=zero3,precision=bf16,recompute=full",
        *WITHIN_LAYERS,
    ],
)
def test_a_resumed_run_is_bitwise_the_one_that_was_not_interrupted(ranks, tmp_path, plan):
    for resumed, uninterrupted in ranks.run(with_and_without_interruption, ranks_of(plan), plan, tmp_path):
        ours, theirs = resumed.pop("weights"), uninterrupted.pop("weights")
        assert resumed == uninterrupted  # losses, norms, rates, samples, and all that was drawn
        assert len(resumed["steps"]) == STEPS - STEPS // 2
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("dp=2,shard=zero3", "dp=1"),
        ("dp=1", "dp=4,replicate=2,shard=zero1"),
        ("dp=4,shard=zero2,microbatch=1", "dp=2"),
        ("dp=2,shard=zero3-once,microbatch=1", "dp=4,replicate=2,shard=zero3-once"),
        ("dp=2,exchange=naive", "dp=2,shard=zero3"),
        ("dp=3,shares=1-4-3", "dp=2,shard=zero1,shares=1-3"),
    ],
)
def test_a_run_goes_on_under_another_layout_and_sees_each_sample_once(ranks, tmp_path, plain, first, second):
    saved = ranks.run(save_half_way, ranks_of(first), first, tmp_path)
    resumed = ranks.run(resume_half_way, ranks_of(second), second, saved[0][0])
    for losses, _ in resumed:
        assert losses == pytest.approx(plain[STEPS // 2 :], **CLOSE)
    seen = collections.Counter(number for _, numbers in (*saved, *resumed) for number in numbers)
    assert SAMPLES == STEPS * BATCH  # one epoch
    assert seen == collections.Counter(range(SAMPLES))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp=2", "dp=1"),
        ("dp=1", "cp=2,tp=2,shard=zero1"),
        ("dp=2,tp=2,shard=zero3", "tp=2,tensor=plain"),
        ("cp=2,shard=zero2", "dp=2,tp=2"),
        ("dp=2,tp=2,shard=zero3,order=tp-dp-cp-pp", "dp=2,tp=2,shard=zero3"),
        ("dp=3,shard=zero3,shares=1-4-3", "dp=2,shard=zero2,shares=1-3"),
    ],
)
def test_a_run_goes_on_with_layers_split_otherwise(ranks, tmp_path, plain, first, second):
    saved = ranks.run(save_half_way, ranks_of(first), first, tmp_path)
    for losses, _ in ranks.run(resume_half_way, ranks_of(second), second, saved[0][0]):
        assert losses == pytest.approx(plain[STEPS // 2 :], **CLOSE)


@pytest.mark.parametrize("plan", ["dp=1,microbatch=1", "dp=1,microbatch=4", "dp=2,microbatch=2"])
def test_accumulating_micro_batches_does_not_change_the_losses(ranks, plain, plan):
    for losses in ranks.run(losses_of, ranks_of(plan), plan):
        assert losses == pytest.approx(plain, **CLOSE)


@pytest.mark.parametrize("plan", ["dp=1,microbatch=2", "dp=2,microbatch=2", "dp=2,shares=1-3"])
def test_the_masks_of_dropout_depend_on_neither_ranks_nor_micro_batches(ranks, plan):
    wanted = losses_of("dp=1", 3, 0.2)
    for losses in ranks.run(losses_of, ranks_of(plan), plan, 3, 0.2):
        assert losses == pytest.approx(wanted, **CLOSE)


@pytest.mark.parametrize("plan", ["dp=1,microbatch=4", "dp=2,shard=zero3,microbatch=2", "dp=4,microbatch=1"])
def test_validation_is_the_mean_over_samples_whatever_the_ranks_and_the_remainder(ranks, plan):
    counts = [1, 3, 5, 8, 13, SAMPLES, SAMPLES + 5]
    # Weights differ by the one step that was made, in which dropout differs between ranks: so it is made
    # under the same Plan.
    losses = ranks.run(loss_of_each_sample, ranks_of(plan), plan)[0]
    for means in ranks.run(validated, ranks_of(plan), plan, counts):
        assert means == pytest.approx([fmean(losses[:count]) for count in counts], rel=1e-5)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,shard=zero3"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_may_stop_all_ranks_and_leaves_the_weights(ranks, plan, value):
    last = ranks_of(plan) - 1
    for message, same, steps in ranks.run(
        train_into_a_loss_that_is_not_finite, ranks_of(plan), plan, last, value
    ):
        assert "step 3" in message
        assert str(value) in message
        assert same
        assert steps == 3  # the data goes on: what is saved now is behind it


def test_a_plan_that_does_not_fit_the_batch_or_the_ranks_is_refused():
    with pytest.raises(PlanError, match="microbatch=3 does not divide"):
        make_trainer("dp=1,microbatch=3")
    with pytest.raises(PlanError, match="2 ranks, and there are 1"):
        make_trainer("dp=2")


def test_a_checkpoint_of_another_model_is_refused_by_a_tensor_and_its_shapes(tmp_path, monkeypatch):
    checkpoint, _ = save_half_way("dp=1", tmp_path)
    monkeypatch.setitem(SHAPE, "hidden", 32)
    with pytest.raises(CheckpointError, match=r"model/\S+' has shape .*24\].* and .*32\]"):
        make_trainer("dp=1").load(checkpoint)


def test_each_epoch_shows_every_sample_once_in_an_order_of_its_own():
    loss = NotingLoss()
    trainer = make_trainer("dp=1,microbatch=4", loss=loss)
    for _ in range(2 * SAMPLES // BATCH):
        trainer.step()
    trainer.close()
    first, second = loss.seen[:SAMPLES], loss.seen[SAMPLES:]
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
