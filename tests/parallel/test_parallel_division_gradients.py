"""A model whose gradients over ranks would differ from one device's is refused before the first step."""

import pytest
import torch
import torch.nn.functional as F
from parallel_stand_ins import assembled, owned_parts
from torch import nn

from shoal.errors import ModelError, PlanError
from shoal.models import next_token_loss
from shoal.models.attention import causal_attention
from shoal.parallel import Split, TensorLayout, parallelize

VOCABULARY, WIDTH, HEADS, SEQ = 61, 32, 4, 16


class Attention(nn.Module):
    """Attention with norms of each head's queries, which a rank has whole for some of the heads."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.attend = causal_attention

    def forward(self, hidden):
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.output(self.attend(self.norm(query), key, value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Attention, and what the tests vary: a factor on the logits, and what happens in training only."""

    def __init__(self, partial=(), *, has_factor=False, in_training=None):
        super().__init__()
        torch.manual_seed(0)
        heads = dict.fromkeys(("query", "key", "value"), HEADS)
        self.tensor_layout = TensorLayout(
            {"attention": Split(heads, {"output": HEADS})}, "embed", "head", partial=partial
        )
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), Attention()
        self.head, self.drop = nn.Linear(WIDTH, VOCABULARY, bias=False), nn.Dropout(0.5)
        self.factor = nn.Parameter(torch.tensor(1.5)) if has_factor else None
        self.in_training = in_training

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = self.drop(hidden + self.attention(hidden))
        if self.training and self.in_training == "mixes":
            hidden = hidden + F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        if self.training and self.in_training == "draws":
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        logits = self.head(hidden)
        return logits if self.factor is None else logits * self.factor


def trained(arguments, plan):
    """What a rank owns after a step in training mode without dropout, or the error of parallelize."""
    model = Model(**arguments)
    model.drop.p = 0.0
    try:
        parallel = parallelize(model, plan)
    except (ModelError, PlanError) as error:
        return str(error)
    tokens = torch.randint(VOCABULARY, (2, SEQ + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = (parallel.local_sequence(each) for each in (tokens[:, :-1], tokens[:, 1:]))
    next_token_loss(parallel(inputs), targets).backward()
    torch.optim.SGD(parallel.parameters(), lr=1.0).step()
    return owned_parts(parallel)


@pytest.mark.parametrize(
    ("arguments", "plan", "words"),
    [
        ({}, "tp=2,tensor=plain", "add 'attention.norm.weight' to the TensorLayout's `partial`"),
        (
            {"partial": ("*.norm.weight", "factor"), "has_factor": True},
            "tp=2,tensor=plain",
            "take 'factor' out of the TensorLayout's `partial`",
        ),
        ({"has_factor": True}, "tp=2", "the gradient of factor over ranks differs"),
        ({"in_training": "mixes"}, "tp=2", "add tensor=plain"),
        ({"in_training": "mixes"}, "cp=2", "differs from one device's in training"),
        ({"in_training": "mixes"}, "cp=2,context=ulysses", "leave out cp"),
    ],
)
def test_it_is_refused(ranks, arguments, plan, words):
    for refusal in ranks.run(trained, 2, arguments, plan):
        assert isinstance(refusal, str), "it is trained"
        assert words in refusal


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ({"partial": ("*.norm.weight",), "has_factor": True}, "tp=2,tensor=plain"),
        ({}, "tp=2"),
        ({"partial": ("*.norm.weight",), "in_training": "mixes"}, "tp=2,tensor=plain"),
        ({"has_factor": True}, "cp=2"),
        ({}, "cp=2,context=ulysses"),
    ],
)
def test_a_model_that_is_right_trains_as_on_one_device(ranks, arguments, plan):
    results = ranks.run(trained, 2, arguments, plan)
    assert not any(isinstance(each, str) for each in results), results[0]
    expected, found = assembled([trained(arguments, "dp=1")]), assembled(results)
    for name, value in expected.items():  # one step in fp32, with sums in another order
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["cp=2", "tp=2"])
def test_a_model_that_draws_in_training_is_asked_in_evaluation_alone(ranks, plan):
    assert not any(isinstance(each, str) for each in ranks.run(trained, 2, {"in_training": "draws"}, plan))
