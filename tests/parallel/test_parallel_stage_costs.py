"""What pieces of a model cost: computed as the model's FLOP are, measured by the clock."""

import pytest
import torch
from torch import nn

from shoal.errors import ConfigError, ModelError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.parallel.pipeline import pieces as module
from shoal.parallel.pipeline.pieces import computed_costs, measured_costs
from shoal.parallel.pipeline.stage_layout import StageLayout, stages_of
from shoal.parallel.pipeline.stages import take_stages
from shoal.spec.plan.stages import Cost, split_by_cost

SHAPE = {"vocab_size": 61, "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 12}
TOKENS = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(1))


def transformer(**changes):
    model = Transformer(TransformerConfig(**(SHAPE | changes)))
    model.initialize(0)
    return model


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True}, {"experts": 4, "experts_per_token": 2, "expert_ffn": 24}]
)
def test_computed_costs_are_the_flop_of_a_token(changes):
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**(SHAPE | changes)))
    costs = computed_costs(model, stages_of(model))
    total = sum(cost.forward + cost.backward for cost in costs)
    assert total == pytest.approx(model.config.flops_per_token(SHAPE["seq"]))
    assert costs[0].forward == 0
    assert costs[-1].forward == 2 * 61 * 32
    assert len({cost.forward for cost in costs[1:-1]}) == 1


class Clock:
    """Stands in for `time`: it goes on only where a model says that it works."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Works(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += next(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += next(ctx.seconds)
        return gradient, None, None


class Piece(nn.Module):
    """A layer that takes so long in forward and in backward, and longer in one of four rounds."""

    def __init__(self, clock, forward, backward, slow=10.0):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.clock = clock
        rounds = [1000.0, 1.0, slow, 1.0]  # the first does not count
        self.seconds = iter([each * factor for factor in rounds for each in (forward, backward)])

    def forward(self, hidden):
        return Works.apply(self.layer(hidden), self.clock, self.seconds)


class Uneven(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.embed = Piece(clock, 1, 2)
        self.blocks = nn.ModuleList(Piece(clock, each, 3 * each) for each in (1, 8, 2, 4))
        self.norm = nn.Identity()
        self.head = Piece(clock, 16, 32)

    def forward(self, hidden):
        hidden = self.embed(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@pytest.fixture
def clock(monkeypatch):
    ticking = Clock()
    monkeypatch.setattr(module, "time", ticking)
    return ticking


def test_measured_costs_are_medians_of_each_piece_s_own_time(clock):
    model = Uneven(clock)
    costs = measured_costs(model, StageLayout(), torch.randn(2, 4), torch.sum)
    assert [(cost.forward, cost.backward) for cost in costs] == [
        (1, 2),
        (1, 3),
        (8, 24),
        (2, 6),
        (4, 12),
        (16, 32),
    ]
    assert {cost.memory for cost in costs} == {4.0 * 4 * (4 * 4 + 4)}
    # 3, 4, 32, 8, 16 and 48 in all
    assert split_by_cost(costs, 2) == (5, 1)
    assert split_by_cost(costs, 3) == (3, 2, 1)


def test_work_beside_a_piece_without_modules_counts_with_the_block_there(clock):
    model = nn.Sequential(*(Piece(clock, each, 2 * each) for each in (1, 5, 2)))
    layout = stages_of(model)

    def loss(output):
        clock.now += 100
        return output.sum()

    costs = measured_costs(model, layout, torch.randn(2, 4), loss)
    assert [(cost.forward, cost.backward) for cost in costs] == [(0, 0), (1, 2), (5, 10), (102, 4), (0, 0)]


def test_an_embedding_that_is_not_trained_has_no_backward(clock):
    model = Uneven(clock)
    for parameter in model.embed.parameters():
        parameter.requires_grad_(requires_grad=False)
    model.embed.seconds = iter([1.0] * 4)
    first, second, *_ = measured_costs(model, StageLayout(), torch.randn(2, 4), torch.sum)
    assert (first.forward, first.backward) == (1, 0)
    assert (second.forward, second.backward) == (1, 3)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_was_measured_trains_as_before(tied):
    measured, expected = transformer(tie_embeddings=tied), transformer(tie_embeddings=tied)
    costs = measured_costs(
        measured,
        stages_of(measured),
        TOKENS[:, :-1],
        lambda output: next_token_loss(output, TOKENS[:, 1:]),
        rounds=1,
    )
    assert len(costs) == SHAPE["layers"] + 2
    assert all(isinstance(cost, Cost) and cost.forward > 0 and cost.backward > 0 for cost in costs)
    assert all(parameter.grad is None for parameter in measured.parameters())
    first, last = take_stages(measured, stages_of(measured), {0: range(3), 1: range(3, 6)})
    with torch.no_grad():
        logits = last(TOKENS[:, :-1], first(TOKENS[:, :-1]))
        torch.testing.assert_close(logits, expected(TOKENS[:, :-1]), rtol=0, atol=0)
    parallel = parallelize(measured, "dp=1")
    for model in (parallel, expected):
        next_token_loss(model(TOKENS[:, :-1]), TOKENS[:, 1:]).backward()
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    assert parallel.gradient_norm() == pytest.approx(
        sum(each.square().sum().item() for each in gradients.values()) ** 0.5, rel=1e-5
    )


def test_what_cannot_be_measured_is_refused():
    model = transformer()
    with pytest.raises(ConfigError, match="in 0 rounds"):
        measured_costs(model, stages_of(model), TOKENS, torch.sum, rounds=0)
    with pytest.raises(ModelError, match="names words"):
        measured_costs(model, StageLayout(embed=("words",)), TOKENS, torch.sum)
