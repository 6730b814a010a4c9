"""Forwards, backwards and steps in any order, and with parts left out."""

import copy

import pytest
import torch
import torch.distributed as dist
from parallel_stand_ins import SHARDS, evaluate, one_step, tokens, transformer
from torch import nn

from shoal.models import next_token_loss
from shoal.parallel import parallelize


def look_between_backward_and_step(text):
    parallel = parallelize(transformer(), text)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    one_step(parallel, tokens(dist.get_rank()))
    parallel(tokens()[:, :-1])  # a loss that is never propagated back
    with parallel.gathered(), torch.no_grad():
        parallel(tokens()[:, :-1])
    optimizer.step()
    with torch.no_grad():
        return parallel(tokens()[:, :-1])


@pytest.mark.parametrize("layout", [*(f"dp=2,shard={shard}" for shard in SHARDS), "dp=2,precision=bf16"])
def test_a_forward_between_backward_and_step_does_not_hide_the_step(ranks, layout):
    shard = layout.partition("shard=")[2] or "none"
    first, second = ranks.run(look_between_backward_and_step, 2, layout)
    assert torch.equal(first, second)
    if "bf16" not in layout:
        wanted = ranks.run(evaluate, 2, f"dp=2,shard={shard}")[0]
        torch.testing.assert_close(first, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shard", SHARDS)
def test_two_forwards_may_come_before_their_backwards(shard):
    expected, parallel = transformer(), parallelize(transformer(), f"shard={shard}")
    for model in (expected, parallel):
        losses = [next_token_loss(model(batch[:, :-1]), batch[:, 1:]) for batch in (tokens(0), tokens(1))]
        with torch.no_grad():
            model(tokens(2)[:, :-1])
        for loss in losses:
            loss.backward()
    wanted = dict(expected.named_parameters())
    for owned in parallel.owned:
        gradient = wanted[owned.name].grad.flatten()[owned.start : owned.stop]
        torch.testing.assert_close(owned.gradient.flatten(), gradient)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(3, 3)]), nn.ModuleDict({"a": nn.Linear(3, 3)})])
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x, head):
        x = self.blocks[1]["a"](self.blocks[0][0](x))
        return (self.first if head == 0 else self.second)(x).sum()


@pytest.mark.parametrize("layout", [*(f"shard={shard}" for shard in SHARDS), "precision=bf16"])
def test_a_backward_that_leaves_out_a_parameter_keeps_its_gradient(layout):
    torch.manual_seed(0)
    expected = TwoHeads()
    parallel = parallelize(copy.deepcopy(expected), layout)
    for model in (expected, parallel):
        model(torch.ones(1, 3), 0).backward()
        model(torch.ones(1, 3), 1).backward()
    gradients = {owned.name: owned.gradient.flatten() for owned in parallel.owned}
    tolerance = {"rtol": 0.05, "atol": 0.01} if "bf16" in layout else {}
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad.flatten(), **tolerance)


def give_up_a_step(text):
    parallel = parallelize(transformer(), text)
    with parallel.accumulate():
        one_step(parallel, tokens(99))
    parallel.zero_grad()
    one_step(parallel, tokens(dist.get_rank()))
    return parallel.gradient_norm()


@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_that_is_given_up_leaves_nothing_in_the_next(ranks, shard):
    expected = transformer()
    for rank in range(2):
        batch = tokens(rank)
        (next_token_loss(expected(batch[:, :-1]), batch[:, 1:]) / 2).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in expected.parameters()])
    for result in ranks.run(give_up_a_step, 2, f"dp=2,shard={shard}"):
        assert result == pytest.approx(norm.item(), rel=1e-4)


def raise_in_a_forward(text):
    model = Experts()
    parallel = parallelize(model, text)
    for place in (model.blocks[1], model):
        hook = place.register_forward_hook(refuse)
        with pytest.raises(ValueError, match="given up"):
            parallel(torch.ones(1, 4), True)
        hook.remove()
    parallel(torch.ones(1, 4), True).backward()
    return parallel.gradient_norm(), parallel.full_state_dict()


def refuse(module, arguments, output):
    raise ValueError("given up")


@pytest.mark.parametrize("shard", SHARDS)
def test_a_forward_that_raised_leaves_nothing_in_the_next(ranks, shard):
    (norm, state), _ = ranks.run(raise_in_a_forward, 2, f"dp=2,shard={shard}")
    expected = Experts()
    expected.load_state_dict(state)
    expected(torch.ones(1, 4), True).backward()
    wanted = torch.nn.utils.get_total_norm([parameter.grad for parameter in expected.parameters()])
    assert norm == pytest.approx(wanted.item(), rel=1e-4)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, use):
        return self.always(x) + (self.sometimes(x) if use else 0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x, use):
        for block in self.blocks:
            x = block(x, use)
        return x.square().mean()


def train_experts(text):
    torch.manual_seed(0)
    parallel = parallelize(Experts(), text)
    parallel(torch.ones(1, 4), dist.get_rank() == 0).backward()
    return parallel.gradient_norm()


@pytest.mark.parametrize("shard", SHARDS)
def test_a_parameter_that_some_ranks_leave_out_does_not_stop_the_others(ranks, shard):
    torch.manual_seed(0)
    expected = Experts()
    for use in (True, False):
        (expected(torch.ones(1, 4), use) / 2).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in expected.parameters()])
    for result in ranks.run(train_experts, 2, f"dp=2,shard={shard}"):
        assert result == pytest.approx(norm.item(), rel=1e-4)
