"""A step whose loss or gradient is not finite is left out, is told, and is never met again."""

from __future__ import annotations

import math

import pytest
from run_stand_ins import shoal
from skip_stand_ins import (
    SPOILED,
    run_into_too_many,
    spoil_the_gradient,
    steps_beside_a_run_without,
)

from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.train.optimizer_step import Skips

PLANS = ["dp=1", "dp=2", "dp=2,shard=zero1", "dp=2,shard=zero2,microbatch=2", "dp=2,shard=zero3,microbatch=1"]


def ranks_of(plan):
    return Plan.parse(plan).ranks


def test_a_step_that_was_made_begins_the_count_in_a_row_anew():
    skips = Skips(limit=1)
    for number, reason in enumerate(("a loss of nan", "", "a loss of nan"), start=1):
        skips.note(number, reason)
    assert (skips.total, skips.in_a_row) == (2, 1)
    skips.require_progress()


@pytest.mark.parametrize("plan", PLANS[:4])
def test_a_skipped_step_changes_nothing_but_the_place_in_the_data(ranks, plan):
    """Neither weights, nor the optimizer's state, nor the statistics of BatchNorm."""
    for result in ranks.run(steps_beside_a_run_without, ranks_of(plan), plan, 3):
        assert len(result["reasons"]) == result["total"] == sum(result["values"]) == 1
        assert result["same"]
        assert result["finite"]
        (reason,) = result["reasons"].values()
        assert f"a loss of nan at sample {SPOILED} of the data; a gradient of " in reason
        assert "'first.weight' first and 'last.bias' last" in reason
        assert "learning" not in reason


@pytest.mark.parametrize(("skip", "made"), [(0, 0), (2, 2)])
@pytest.mark.parametrize("plan", ["dp=1", "dp=2,shard=zero3,microbatch=2"])
def test_too_many_in_a_row_end_the_training_and_a_resume_goes_on_behind_them(
    ranks, tmp_path, plan, skip, made
):
    for result in ranks.run(run_into_too_many, ranks_of(plan), plan, skip, tmp_path):
        assert result["message"].startswith(f"step {made + 1} has a loss of nan at samples ")
        assert f"optimizer.skip allows {skip or 'none'}" in result["message"]
        assert result["made"] == made
        assert result["step_count"] == made + 1
        assert result["resumed"] == (made + 2, "", (made + 2) * 4)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2,shard=zero1"])
def test_a_gradient_that_is_not_finite_is_told_apart_from_a_loss(ranks, plan):
    for reason, loss in ranks.run(spoil_the_gradient, ranks_of(plan), plan):
        assert math.isfinite(loss)
        assert reason == (
            "a gradient of 2 parameters that is not finite, 'first.weight' first and 'first.bias' last "
            "in the model's order"
        )


MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(self.embedding(tokens)) / (tokens != 7).all()
"""


def test_a_run_skips_the_batch_and_a_run_that_may_not_goes_on_behind_it(ranks, tiny_run, tmp_path):
    (tmp_path / "spoiled_model.py").write_text(MODEL)
    (tmp_path / "text").mkdir()
    for number in range(20):
        spoiled = "\a" if number == 3 else ""
        (tmp_path / "text" / f"{number}.txt").write_text(f"some text {spoiled} of document {number}. " * 12)
    arguments = ["--set", "model=spoiled_model:Model", "--set", "sequence=32", "--set", "batch=4"]
    arguments += ["--set", f"data.source={tmp_path / 'text'}", "--set", f"data.cache={tmp_path / 'cache'}"]
    arguments += ["--set", "validation.samples=4", "--set", "checkpoint.every=2", "--nproc", "1"]

    def train(*words):
        return ranks.run(shoal, 1, ["train", *words], tmp_path)[0]

    steps = ["--set", "steps=30"]
    code, out, err = train(*arguments, *steps, "--run", "skipping")
    assert code == 0, err
    metrics = Run.open(tmp_path / "skipping").metrics()
    skipped = [each["step"] for each in metrics if each.get("skipped")]
    assert 0 < len(skipped) < 30
    assert f"skipped     {len(skipped)} steps" in out
    assert f"step {skipped[0]} is skipped: it has a loss of nan at samples " in err

    words = [*arguments, *steps, "--set", "optimizer.skip=0", "--run", "stopping"]
    for failures in range(len(skipped) + 1):
        code, _, err = train(*words)
        if code == 0:
            break
        assert f"TrainingError: step {skipped[failures]} has a loss of nan at samples " in err
        words = ["--resume", "stopping", "--nproc", "1"]
    assert code == 0
    assert failures == len(skipped)
