"""Small models of Hugging Face's kinds, masked tokens, packed documents and evaluation are compared too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kind_cells import CELLS, Kind, every_kind, read, run, verdict_of
from torch import nn

from shoal.errors import ModelError
from shoal.models.tiny_hugging_face import causal, kind_of, kinds, masked
from shoal.parallel import DocumentsGuard
from shoal.spec.plan import Plan, SettledPlan
from shoal.testing.check import Comparison, Trial
from shoal.testing.check.reference import Reference, Sums
from shoal.testing.check.trial import RandomTokens

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "kinds.jsonl"


class Words(nn.Module):
    """Each token is predicted from the mean of the tokens before it, of its document or of the sample."""

    def __init__(self, *, apart: bool, skewed: bool = False) -> None:
        super().__init__()
        self.apart, self.skewed = apart, skewed
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens, position_ids=None):
        hidden = self.embed(tokens).cumsum(1)
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1]).expand_as(tokens)
        elif self.apart:
            starts = torch.arange(tokens.shape[1]) - position_ids
            before = F.pad(hidden, (0, 0, 1, 0)).gather(1, starts[..., None].expand_as(hidden))
            hidden = hidden - before
        is_other = self.skewed and not self.training and dist.is_initialized() and dist.get_rank() == 1
        return self.head(hidden / (position_ids[..., None] + 1)) * (1.01 if is_other else 1.0)


def words(*, apart: bool = True, skewed: bool = False) -> Words:
    return Words(apart=apart, skewed=skewed)


def own(**changes):
    options = {"steps": 2, "batch": 4, "sequence": 16, **changes}
    return Trial(model="test_check_kinds:words", **options)


def compared(trial, plan):
    """The verdict of a Plan, on the first rank."""
    return Comparison(trial, torch.device("cpu")).check(SettledPlan.of(Plan.parse(plan), trial.batch))


@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_documents_that_are_kept_apart_train_as_if_each_were_alone(ranks, plan):
    verdict = ranks.run(compared, Plan.parse(plan).ranks, own(boundaries=True), plan)[0]
    assert verdict.outcome == "passed", verdict


def compared_unasked(trial, plan):
    """The verdict, though nobody asks the model before whether it keeps documents apart."""
    with patch.object(DocumentsGuard, "require"):
        return compared(trial, plan)


def test_documents_that_see_each_other_are_found(ranks):
    trial = own(boundaries=True, model_options={"apart": False})
    assert ranks.run(compared, 1, trial, "dp=1")[0].outcome == "refused"
    verdict = ranks.run(compared_unasked, 1, trial, "dp=1")[0]
    assert verdict.outcome == "failed"
    assert verdict.departure.quantity == "gradient"


def test_another_evaluation_is_found_though_training_is_the_same(ranks):
    verdict = ranks.run(compared, 2, own(model_options={"skewed": True}), "dp=2")[0]
    assert verdict.departure.quantity == "evaluation"
    assert "the loss in evaluation departs by" in verdict.departure.text


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        (Kind("llama", False), "boundaries"),
        (Kind("gpt2", False), "pp"),
        (Kind("bert", True), "zero3"),
        (Kind("qwen3", False), "tp sequence"),
        (Kind("ernie4_5_moe", False), "tp plain"),  # shared experts get all tokens in a row
        (Kind("hy_v3", False), "tp sequence"),
        (Kind("glm4_moe", False), "balance pp"),  # it makes no loss of routers
        (Kind("glm", False), "boundaries"),  # some elements of a bias hardly get a gradient
        (Kind("gemma3n_text", False), "cp ulysses"),  # its second step makes rounding of the first large
        (Kind("ultrabert", True), "boundaries"),  # windows both ways
        (Kind("glm_moe_dsa", False), "boundaries"),  # an indexer selects tokens
        (Kind("reformer", False), "zero3"),  # reversible layers
    ],
)
def test_a_small_model_of_a_kind_trains_as_on_one_device(ranks, kind, cell):
    (line, *_) = ranks.run(verdict_of, Plan.parse(CELLS[cell]).ranks, kind, cell, CELLS[cell])
    assert line["verdict"] == "equal", line


def test_a_window_of_the_language_model_in_a_model_of_images_counts_under_cp(ranks):
    line = ranks.run(verdict_of, 2, Kind("gemma3", False), "cp ring", CELLS["cp ring"])[0]
    assert line["verdict"] == "refused"
    assert "attention has a window of 8 tokens" in line["words"]


def test_the_reference_has_the_routers_balance_loss_of_hugging_face():
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    trial = Trial(model="hf:mixtral", model_options=options, steps=1, batch=4, sequence=8)
    sums = Sums(torch.float32, torch.float32, 4)
    model = trial.build("cpu")
    inputs, targets = trial.samples(model).batch(torch.tensor(trial.batch_of(0)).numpy())
    expected = model(inputs, labels=targets, shift_labels=targets.contiguous()).loss
    alone = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
    reference = Reference(trial, sums, torch.device("cpu")).run()[0]
    assert reference.loss == pytest.approx(expected.item(), rel=1e-5)  # sums in another order
    assert expected - alone > 0.1


@pytest.mark.parametrize("kind", ["opt", "gemma3n_text", "zamba2", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_sizes_that_depend_on_one_another_fit(kind):
    """Kinds with layers of several types, latent attention, state spaces, shared layers."""
    if kind not in kinds():
        pytest.skip(f"this transformers has no {kind}")
    model = causal(kind)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
    model(torch.arange(8)[None] + 20).logits.sum().backward()


def test_what_is_no_kind_or_lacks_a_package_is_named(monkeypatch):
    with pytest.raises(
        ModelError, match=r"no causal language model of the kind 'lama' \(did you mean 'llama'"
    ):
        causal("lama")
    with pytest.raises(ModelError, match="no masked language model of the kind 'llama'"):
        masked("llama")

    def lacking(*_, **__):
        raise ImportError("TimmWrapperModel requires the timm library")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lacking)
    with pytest.raises(ModelError, match="needs a package that is not installed: TimmWrapperModel requires"):
        causal("llama")


def test_a_path_is_no_kind(tmp_path):
    assert kind_of(f"hf:{tmp_path}") is None
    assert kind_of("tiny") is None
    assert kind_of("hf:llama") == "llama"


def test_masked_samples_have_targets_at_the_hidden_tokens_alone():
    samples = RandomTokens(range(2, 20), 64, 16, 0, masked=True)
    plain = RandomTokens(range(2, 18), 64, 16, 0)
    inputs, targets = samples.batch(torch.arange(64).numpy())
    tokens, _ = plain.batch(torch.arange(64).numpy())
    hidden = targets != -100
    assert torch.equal(hidden, inputs == 18)
    assert torch.equal(inputs[~hidden], tokens[~hidden])
    assert torch.equal(targets[hidden], tokens[hidden])
    assert len(set(hidden.sum(1).tolist())) > 1  # ranks count different numbers of targets


@pytest.mark.long
def test_every_kind_under_every_plan_is_equal_or_refused(tmp_path):
    """An hour. With SHOAL_KINDS=FILE it keeps its lines, and goes on after those that are there."""
    file = Path(os.environ.get("SHOAL_KINDS", tmp_path / "kinds.jsonl"))
    run(file, every_kind())
    found = {(line["kind"], line["cell"]): line for line in read(file)}
    bad = {key: line["words"] for key, line in found.items() if line["verdict"] in ("wrong", "crash")}
    assert not bad
    rows = [json.loads(row) for row in PAGE.read_text(encoding="utf-8").splitlines()]
    lost = [
        (row["kind"], cell)
        for row in rows
        for cell in CELLS
        if row.get(cell) == "equal" and found[row["kind"], cell]["verdict"] != "equal"
    ]
    assert not lost, "these were equal"
