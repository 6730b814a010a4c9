"""Hugging Face's causal models and models of one's own train in a pipeline as in one process."""

import pytest
import torch
from hugging_face_stand_ins import BATCH, SEQ, SHAPE, STEPS, build
from parallel_stand_ins import assembled, owned_parts
from torch import nn

from shoal.errors import ModelError
from shoal.models import next_token_loss
from shoal.parallel import StageLayout, parallelize, require_layout
from shoal.spec.plan import Plan


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


@pytest.mark.parametrize(
    ("plan", "kind", "changes"),
    [
        ("tp=2,pp=2", "llama", {}),
        ("tp=2,pp=2,schedule=zb-v", "llama", {"tie_word_embeddings": True}),
        ("tp=2,pp=2,tensor=async,schedule=interleaved,recompute=full", "qwen2", {}),
        ("tp=2,pp=2,split=0-4", "qwen3", {"head_dim": 8}),
        ("tp=2,pp=2,schedule=zb-h1", "mistral", {"sliding_window": 4}),
        ("dp=2,tp=2,pp=2,shard=zero3", "qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
        ("tp=2,cp=2,pp=2", "llama", {}),
    ],
)
def test_the_stream_may_be_split_along_the_sequence(ranks, plan, kind, changes):
    require_layout(build(kind, FOUR | changes), Plan.parse(plan), SEQ)
    check(ranks, build, plan, kind, FOUR | changes)


def forms_of_boundaries(plan):
    """The shapes of what this rank sends to and gets from the other stages."""
    parallel = parallelize(build("llama", FOUR), plan)
    axis = parallel.axes.pp
    shapes = []
    send, receive = axis.send, axis.receive

    def noted(operation):
        def call(tensor, peer, name):
            if name.startswith(("activation", "gradient")):
                shapes.append(tuple(tensor.shape))
            return operation(tensor, peer, name)

        return call

    axis.send, axis.receive = noted(send), noted(receive)
    tokens = torch.zeros(2, SEQ + 1, dtype=torch.long)
    parallel.forward_backward(iter([(tokens[:, :-1], tokens[:, 1:])] * 2), 2, next_token_loss)
    return set(shapes)


def test_stages_hand_on_this_rank_s_part_of_the_sequence(ranks):
    # also behind a stage with the embedding alone, where the model has the whole sequence's length
    for plan in ("tp=2,pp=2", "tp=2,pp=2,split=0-4"):
        assert ranks.run(forms_of_boundaries, 4, plan) == [{(2, SEQ // 2, 32)}] * 4


class Mixing(nn.Module):
    """A block that takes more than the hidden state, and gives more."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, hidden, shift, *, factor):
        mixed = hidden + self.scale * torch.tanh(self.mix(hidden.cumsum(1) * factor + shift))
        return mixed, mixed.mean()


def first_of(given):
    return given[0]


def first_of_two(given):
    hidden, _ = given
    return hidden


class Own(nn.Module):
    """A model that says itself how it is cut."""

    stage_layout = StageLayout(embed=("words",), blocks="body.layers", end=("final",))

    def __init__(self, tied, taken=first_of):
        super().__init__()
        torch.manual_seed(0)
        self.taken = taken
        self.words = nn.Embedding(SHAPE["vocab_size"], 24)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(Mixing(24) for _ in range(4))
        self.final = nn.Linear(24, SHAPE["vocab_size"], bias=False)
        if tied:
            self.final.weight = self.words.weight

    def forward(self, tokens):
        hidden = self.words(tokens)
        for layer in self.body.layers:
            shift = torch.linspace(0, 1, hidden.shape[1])[:, None]
            hidden = self.taken(layer(hidden, shift, factor=0.1))
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


@pytest.mark.parametrize(
    "plan", ["pp=4", "pp=2,schedule=zb-v", "pp=2,split=0-4", "pp=2,schedule=interleaved"]
)
def test_its_forward_may_unpack_what_a_block_gives(ranks, plan):
    check(ranks, Own, plan, False, first_of_two)


class Adding(Own):
    """The forward uses what a block gives beside the hidden state."""

    def forward(self, tokens):
        hidden, total = self.words(tokens), 0
        for layer in self.body.layers:
            hidden, mean = layer(hidden, 0.0, factor=0.1)
            total = total + mean
        return self.final(hidden) + total


def refused(plan):
    tokens = torch.zeros(2, SEQ, dtype=torch.long)
    parallel = parallelize(Adding(False), plan)
    try:
        parallel.evaluate(tokens)
    except ModelError as error:
        return str(error)


def test_more_than_the_hidden_state_of_another_stage_is_refused(ranks):
    _, second = ranks.run(refused, 2, "pp=2")
    assert "another output of a piece than the hidden state" in second
