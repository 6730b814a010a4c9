"""Hugging Face's causal models and models of one's own train in a pipeline as in one process."""

import pytest
import torch
from hugging_face_stand_ins import BATCH, SEQ, SHAPE, STEPS, build
from parallel_stand_ins import assembled, owned_parts
from torch import nn

from shoal.errors import PlanError
from shoal.models import next_token_loss
from shoal.parallel import StageLayout, parallelize, require_layout
from shoal.plan import Plan


def train(make, plan, *arguments):
    """Losses and gradient norms by step, and what this rank owns at the end."""
    parallel = parallelize(make(*arguments), plan)
    # Adam would divide a wrong factor out, and make rounding of gradients near zero large.
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(STEPS):
        batch = torch.randint(SHAPE["vocab_size"], (BATCH, SEQ + 1), generator=generator)
        micro = parallel.local(batch).split(1)
        pairs = (
            tuple(parallel.local_sequence(each) for each in (tokens[:, :-1], tokens[:, 1:]))
            for tokens in micro
        )
        total = parallel.forward_backward(pairs, len(micro), next_token_loss)
        norm = parallel.gradient_norm()
        optimizer.step()
        optimizer.zero_grad()
        parallel.axes.pp.all_reduce(total, "loss").wait()
        parallel.axes.data.all_reduce(total, "loss").wait()
        results.append((total.item() / parallel.axes.data.size, norm))
    return results, owned_parts(parallel)


def check(ranks, make, plan, *arguments):
    results = ranks.run(train, Plan.parse(plan).ranks, make, plan, *arguments)
    expected, owned = train(make, "dp=1", *arguments)
    for losses, _ in results:
        # sums in another order, over a few steps
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    reference, whole = assembled([owned]), assembled([parts for _, parts in results])
    assert whole.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(
            whole[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


FOUR = {"num_hidden_layers": 4}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_it_trains_as_in_one_process(ranks, kind):
    check(ranks, build, "pp=2,schedule=zb-h1", kind, FOUR)


@pytest.mark.parametrize(
    ("plan", "tied"),
    [
        ("dp=2,pp=2,shard=zero3", True),
        ("dp=2,pp=2,shard=zero1,schedule=interleaved", False),
        ("tp=2,pp=2,tensor=plain", True),
        ("tp=2,pp=2,tensor=plain,schedule=zb-v,recompute=full", False),
        ("cp=2,pp=2", False),
        ("cp=2,pp=2,context=ulysses,schedule=zb-v", True),
    ],
)
def test_it_composes_with_the_other_axes(ranks, plan, tied):
    check(ranks, build, plan, "llama", {**FOUR, "tie_word_embeddings": tied})


@pytest.mark.parametrize("plan", ["pp=2,schedule=zb-h1", "dp=2,pp=2,shard=zero3"])
def test_models_whose_configuration_says_no_stages_are_known(ranks, plan):
    changes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": SEQ}
    check(
        ranks, build, plan, "gpt2", changes | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    )


def test_a_split_of_the_stream_is_refused():
    with pytest.raises(PlanError, match="tensor=plain"):
        require_layout(build("llama", FOUR), Plan.parse("tp=2,pp=2"), SEQ)


class Mixing(nn.Module):
    """A block that takes more than the hidden state, and gives more."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, hidden, shift, *, factor):
        mixed = hidden + self.scale * torch.tanh(self.mix(hidden.cumsum(1) * factor + shift))
        return mixed, mixed.mean()


class Own(nn.Module):
    """A model that says itself how it is cut."""

    stage_layout = StageLayout(embed=("words",), blocks="body.layers", end=("final",))

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(SHAPE["vocab_size"], 24)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(Mixing(24) for _ in range(4))
        self.final = nn.Linear(24, SHAPE["vocab_size"], bias=False)
        if tied:
            self.final.weight = self.words.weight

    def forward(self, tokens):
        shift = torch.linspace(0, 1, tokens.shape[1])[:, None]
        hidden = self.words(tokens)
        for layer in self.body.layers:
            hidden = layer(hidden, shift, factor=0.1)[0]
        return self.final(hidden)


@pytest.mark.parametrize(
    ("plan", "tied"),
    [
        ("pp=2", True),
        ("pp=4,schedule=zb-h1", False),
        ("pp=2,schedule=zb-v", True),
        ("dp=2,pp=2,shard=zero2,schedule=interleaved", False),
    ],
)
def test_a_model_of_ones_own_trains_by_its_stage_layout(ranks, plan, tied):
    check(ranks, Own, plan, tied)
