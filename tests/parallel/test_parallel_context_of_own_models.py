"""A model of the user's own runs under context parallelism once its modules say where they attend."""

import pytest
import torch
import torch.nn.functional as F
from parallel_stand_ins import assembled, owned_parts
from torch import nn

from shoal.errors import ModelError
from shoal.models import next_token_loss
from shoal.models.attention import causal_attention
from shoal.models.transformer import positions_from_zero
from shoal.parallel import parallelize
from shoal.spec.plan import Plan

VOCABULARY, WIDTH, HEADS, SEQ, STEPS = 61, 32, 4, 16, 3


class Layer(nn.Module):
    """Attention with one matrix for query, key and value."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.attend = causal_attention

    def forward(self, hidden):
        heads = self.mixed(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return hidden + self.output(self.attend(*heads).transpose(1, 2).flatten(-2))


class Learned(nn.Module):
    """A model with learned positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.count = positions_from_zero

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.place(self.count(tokens.shape[1], tokens.device))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Undeclared(nn.Module):
    """A model that calls torch's attention itself."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden):
        return F.scaled_dot_product_attention(*self.mixed(hidden).chunk(3, -1), is_causal=True)


def train(plan):
    """Losses by step, and the weights at the end."""
    parallel = parallelize(Learned(), plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        tokens = parallel.local(torch.randint(VOCABULARY, (4, SEQ + 1), generator=generator))
        inputs, targets = (parallel.local_sequence(each) for each in (tokens[:, :-1], tokens[:, 1:]))
        loss = next_token_loss(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        parallel.axes.data.all_reduce(total, "loss").wait()
        losses.append(total / parallel.axes.data.size)
    return torch.stack(losses), owned_parts(parallel)


@pytest.mark.parametrize(
    "plan", ["cp=2", "cp=2,context=ulysses", "dp=2,cp=2,shard=zero3,recompute=full", "cp=4,shard=zero1"]
)
def test_it_trains_as_in_one_process(ranks, plan):
    expected, owned = train("dp=1")
    results = ranks.run(train, Plan.parse(plan).ranks, plan)
    for losses, _ in results:
        # fp32 sums in another order, over a few steps
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    whole = assembled([parts for _, parts in results])
    for name, value in assembled([owned]).items():
        torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=2e-5)


def refused():
    with pytest.raises(ModelError) as caught:
        parallelize(Undeclared(), "cp=2")
    return str(caught.value)


def test_attention_that_is_not_declared_is_refused_with_what_to_write(ranks):
    text = ranks.run(refused, 2)[0]
    assert "Undeclared has no attention that works across ranks" in text
    assert "self.attend = causal_attention" in text


class Adapted(nn.Module):
    """Attention, and layers behind it that a rank may leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = Layer()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, hidden, skip):
        hidden = self.attention(hidden)
        return hidden if skip else sum((layer(hidden) for layer in self.layers), hidden)


def train_with_layers_of_one_rank(plan):
    parallel = parallelize(Adapted(), plan)
    hidden = parallel.local_sequence(torch.ones(2, SEQ, WIDTH))
    for _ in range(2):
        parallel(hidden, skip=parallel.axes.cp.index == 1).square().mean().backward()
    return [owned.name for owned in parallel.owned if owned.gradient is None]


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2"])
def test_parameters_with_a_gradient_on_one_rank_do_not_hold_attention_up(ranks, shard):
    """The buckets are small: several would be waited for before attention's backward, where ranks meet."""
    plan = f"cp=2,shard={shard},bucket=4KiB"
    assert ranks.run(train_with_layers_of_one_rank, 2, plan, timeout=120) == [[], []]
