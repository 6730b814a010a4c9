"""Parameters without a gradient, frozen ones, and ranks of which only some have a gradient."""

import pytest
import torch
import torch.distributed as dist
from parallel_stand_ins import SHARDS
from torch import nn

from shoal.parallel import parallelize


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.spare = nn.Linear(8, 8)
        self.late = nn.Linear(8, 8)

    def forward(self, x, late=False):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.late(x) if late else x


def trained(plan):
    """Which parameters move in each of three steps; `late` has a gradient in the last alone, on rank 1."""
    torch.manual_seed(0)
    parallel = parallelize(Model(), plan)
    before = parallel.full_state_dict()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, weight_decay=0.5)
    frozen = dict(parallel.named_parameters())["blocks.1.weight"]
    moved = []
    for number in range(3):
        frozen.requires_grad_(number != 1)
        late = number == 2 and (not dist.is_initialized() or dist.get_rank() == 1)
        parallel(torch.ones(2, 8), late=late).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = parallel.full_state_dict()
        moved.append({name: not torch.equal(after[name], before[name]) for name in after})
        before = after
    return moved


PLANS = [*(f"dp=2,shard={shard}" for shard in SHARDS), "dp=4,replicate=2,shard=zero3"]


@pytest.mark.parametrize("plan", [*PLANS, "dp=2,precision=bf16", "dp=2,exchange=naive"])
def test_only_what_has_a_gradient_on_some_rank_moves(ranks, plan):
    moved = ranks.run(trained, int(plan[3]), plan)[0]
    for number, names in enumerate(moved):
        assert not names["spare.weight"]
        assert not names["spare.bias"]
        assert names["late.weight"] == names["late.bias"] == (number == 2)
        assert names["blocks.1.weight"] == (number != 1)
        assert names["blocks.0.weight"]
        assert names["blocks.1.bias"]


def held_of_a_frozen_base(plan):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    parallel = parallelize(model, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()
    }
    parts = {
        each.local.untyped_storage().data_ptr(): each.local.untyped_storage().nbytes()
        for each in parallel.frozen
    }
    return sum(storages.values()), sum(parts.values()), parallel.full_state_dict()


def test_zero3_shares_what_is_frozen_too(ranks):
    whole = 4 * 64 * 65 * 4
    for rank, (weights, frozen, state) in enumerate(ranks.run(held_of_a_frozen_base, 2, "dp=2,shard=zero3")):
        assert weights < 64  # dropped between steps
        assert frozen <= whole * 3 / 8 + 64
        assert rank or not any(each.isnan().any() for each in state.values())


class Crossing(nn.Module):
    """A block that calls another and reads its weight; a recurrent layer that is in no block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[2].forward = self.cross
        self.mix = nn.GRU(8, 8)

    def cross(self, x):
        x = self.blocks[0](x) @ self.blocks[3].weight
        return nn.functional.linear(x, self.blocks[2].weight, self.blocks[1].bias)

    def features(self, x):
        x = self.mix(x)[0]
        for block in self.blocks:
            x = x + block(x).tanh()
        return x + self.blocks[1].weight.sum()

    def forward(self, x):
        return self.features(x)


def train_crossing(plan):
    torch.manual_seed(0)
    parallel = parallelize(Crossing(), plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for number in range(4):
        call = parallel if number % 2 else parallel.module.features
        call(torch.ones(2, 3, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parallel.full_state_dict()


@pytest.mark.parametrize("shard", SHARDS)
def test_blocks_may_use_one_another(ranks, shard):
    expected = train_crossing("")
    state = ranks.run(train_crossing, 2, f"dp=2,shard={shard}")[0]
    # fp32 sums in another order, by kernels that depend on the processor: activations of about 10 are rounded
    # to 1e-6, and their gradients enter four updates.
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=4e-6)


class Meeting(torch.autograd.Function):
    """All ranks of a group meet in its backward, as those of synchronised batch norms do."""

    @staticmethod
    def forward(context, tensor, group):
        context.group = group
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        dist.all_reduce(torch.zeros(4), group=context.group)
        return gradient, None


class Uneven(nn.Module):
    """The last layers have gradients on one rank alone, and ranks meet before those of the first."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.group = None

    def forward(self, x, skip):
        x = Meeting.apply(self.first(x), self.group)
        return x if skip else sum((block(x) for block in self.blocks), x)


def train_unevenly(plan):
    torch.manual_seed(0)
    model = Uneven()
    model.group = dist.new_group()
    parallel = parallelize(model, plan)
    for _ in range(2):
        parallel(torch.ones(2, 64), skip=dist.get_rank() == 1).sum().backward()
    return {owned.name: owned.gradient for owned in parallel.owned}


@pytest.mark.parametrize("shard", SHARDS[:2])
def test_ranks_that_meet_within_a_backward_need_not_have_the_same_gradients(ranks, shard):
    """The buckets are small: several would be waited for before the meeting."""
    results = ranks.run(train_unevenly, 2, f"dp=2,shard={shard},bucket=16KiB", timeout=120)
    assert all(value is not None for result in results for value in result.values())


def test_zero3_says_where_it_saves_no_memory():
    with pytest.warns(UserWarning, match="blocks="):
        parallelize(nn.Linear(2, 2), "shard=zero3")
