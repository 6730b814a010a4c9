"""What is drawn at random, and what differs between ranks: bitwise the same after an interruption."""

from __future__ import annotations

import pytest
import torch
from random_stand_ins import (
    hidden_after_a_resume,
    interrupted,
    losses_of,
    norm_loaded,
    norm_saved,
    norm_synchronised,
    save_as,
    without_collate,
)

from shoal.spec.plan import Plan


def ranks_of(plan):
    return Plan.parse(plan).ranks


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("dropout", "dp=1,microbatch=4"),
        ("dropout", "dp=2,shard=zero1,microbatch=2"),
        ("dropout", "tp=2,tensor=plain"),
        ("norm", "dp=2"),
        ("norm", "dp=2,shard=zero2,microbatch=2"),
    ],
)
def test_a_resumed_run_is_bitwise_the_same_where_data_model_and_statistics_are_random(
    ranks, tmp_path, kind, plan
):
    for resumed, whole in ranks.run(interrupted, ranks_of(plan), kind, plan, tmp_path):
        assert resumed == whole


@pytest.mark.parametrize(
    ("before", "after"), [("dp=2", "tp=2,tensor=plain"), ("dp=1", "dp=2,tp=2,tensor=plain")]
)
def test_after_a_resume_under_another_plan_dropout_agrees_on_what_ranks_have_alike(
    ranks, tmp_path, before, after
):
    path = ranks.run(save_as, ranks_of(before), before, tmp_path)[0]
    found = ranks.run(hidden_after_a_resume, ranks_of(after), after, path)
    for one, other in zip(found[::2], found[1::2], strict=True):  # neighbours along tp
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
        half = len(one) // 2
        assert all(torch.equal(*pair) for pair in zip(one[:half], one[half:], strict=True))  # and repeats
    if len(found) > 2:
        assert not torch.equal(found[0][0], found[2][0])  # other samples have other masks


def test_what_a_sample_draws_depends_on_neither_ranks_nor_micro_batches(ranks):
    expected = without_collate("dp=1,microbatch=8")
    for plan in ("dp=1,microbatch=2", "dp=2,microbatch=2", "dp=2,shard=zero3"):
        for losses in ranks.run(without_collate, ranks_of(plan), plan):
            assert losses == pytest.approx(expected, rel=1e-5)  # fp32 sums in another order


def test_worker_processes_make_the_same_samples():
    assert losses_of("dp=1,microbatch=2", workers=2) == losses_of("dp=1,microbatch=2")


def test_statistics_that_differ_are_each_ranks_own_under_the_same_plan_and_one_ranks_under_another(
    ranks, tmp_path
):
    saved = ranks.run(norm_saved, 2, "dp=2", tmp_path)
    path, (first, second) = saved[0][0], (means for _, means in saved)
    assert first != second
    assert ranks.run(norm_loaded, 2, "dp=2", path) == [(first, 2), (second, 2)]
    assert ranks.run(norm_loaded, 2, "dp=2,shard=zero1", path) == [(first, 2), (first, 2)]
    assert ranks.run(norm_loaded, 1, "dp=1", path) == [(first, 2)]


def test_statistics_may_be_synchronised(ranks):
    found = ranks.run(norm_synchronised, 2, "dp=2")
    assert found[0][0] == found[1][0] == pytest.approx(found[0][1], rel=1e-6)
