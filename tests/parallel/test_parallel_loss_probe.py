"""Under cp a model's own loss is refused if it is no mean over parts of samples, before it is trained on."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from parallel_stand_ins import assembled, owned_parts
from torch import nn

from shoal.errors import ModelError
from shoal.models.attention import causal_attention
from shoal.parallel import TensorLayout, parallelize

VOCABULARY, WIDTH, SEQ = 61, 32, 16


class Model(nn.Module):
    """Attention alone, and a loss of `labels` as `kind` says."""

    tensor_layout = TensorLayout({}, "embed", "head")

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.attend, self.kind = causal_attention, kind

    def forward(self, tokens, labels=None):
        heads = self.embed(tokens).unflatten(-1, (4, -1)).transpose(1, 2)
        logits = self.head(self.attend(heads, heads, heads).transpose(1, 2).flatten(2))
        if labels is None:
            return {"logits": logits}
        reduction = "sum" if self.kind == "sum" else "mean"
        weight = torch.linspace(0.1, 2.0, VOCABULARY) if self.kind == "weighs classes" else None
        smoothing = 0.1 if self.kind == "smooths" else 0.0
        if self.kind == "shifts":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            weight=weight,
            reduction=reduction,
            label_smoothing=smoothing,
        )
        return {"loss": loss, "logits": logits}


class Required(Model):
    """The same with labels that have to be given, and a pair as output."""

    def forward(self, tokens, labels):
        output = super().forward(tokens, labels)
        return output["logits"], output["loss"]


def trained(kind, plan, build=Model):
    """What a rank owns after a step on the model's own loss, or the error; and the warnings of probes."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        parallel = parallelize(build(kind), plan)
    said = [str(each.message) for each in warned if "probed" in str(each.message)]
    tokens = torch.randint(VOCABULARY, (2, SEQ + 1), generator=torch.Generator().manual_seed(1))
    inputs, labels = (parallel.local_sequence(each) for each in (tokens[:, :-1], tokens[:, 1:]))
    try:
        output = parallel(inputs, labels)
    except ModelError as error:
        assert parallel(inputs)["logits"].shape[1] == inputs.shape[1]  # without labels it works
        return str(error), said
    loss = output["loss"] if isinstance(output, dict) else output[1]
    loss.backward()
    torch.optim.SGD(parallel.parameters(), lr=1.0).step()
    return owned_parts(parallel), said


@pytest.mark.parametrize("plan", ["cp=2", "cp=2,context=ulysses"])
@pytest.mark.parametrize("kind", ["shifts", "sum", "weighs classes"])
def test_a_loss_that_is_no_mean_over_parts_is_refused(ranks, kind, plan):
    for refusal, _ in ranks.run(trained, 2, kind, plan):
        assert isinstance(refusal, str), "it is trained"
        assert "labels were given to Model" in refusal
        assert "leave out labels" in refusal


@pytest.mark.parametrize("build", [Model, Required])
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("means", "cp=2"),
        ("smooths", "cp=2,context=ulysses"),
        ("shifts", "tp=2,tensor=plain"),
        ("weighs classes", "tp=2,tensor=plain"),
    ],
)
def test_a_loss_that_is_right_trains_as_on_one_device(ranks, kind, plan, build):
    results = ranks.run(trained, 2, kind, plan, build)
    assert not any(isinstance(found, str) or said for found, said in results), results[0]
    expected = assembled([trained(kind, "dp=1", build)[0]])
    found = assembled([owned for owned, _ in results])
    for name, value in expected.items():  # one step in fp32, with sums in another order
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def asked(kind, plan):
    """The gradient of a model of transformers by its own loss, summed over the ranks; or the error."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_labels=3,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"LlamaFor{kind}")(config).train()
    model.dropout = nn.Identity()
    try:
        parallel = parallelize(model, plan)
        tokens = parallel.local_sequence(1 + torch.arange(2 * SEQ).view(2, SEQ) % (VOCABULARY - 1))
        answers = torch.tensor([1, 2])
        given = {"start_positions": answers, "end_positions": answers + 1} if kind.startswith("Q") else {}
        parallel(input_ids=tokens, **(given or {"labels": answers})).loss.backward()
    except ModelError as error:
        return str(error)
    return [parallel.gradient_norm()]


def test_transformers_own_loss_sees_whole_samples_and_logits_or_is_refused(ranks):
    for kind in ("QuestionAnswering", "SequenceClassification"):
        (expected,) = asked(kind, "dp=1")
        for (norm,) in ranks.run(asked, 2, kind, "tp=2,tensor=plain"):
            assert norm == pytest.approx(expected, rel=1e-5)  # fp32, in another order
    for refusal in ranks.run(asked, 2, "QuestionAnswering", "cp=2"):
        assert isinstance(refusal, str)
        assert "computed its own loss, which sees a rank's part of the samples" in refusal
