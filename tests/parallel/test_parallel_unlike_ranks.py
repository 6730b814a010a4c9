"""Ranks whose forwards and losses differ: blocks left out, parameters without a gradient on some ranks."""

import pytest
import torch
import torch.distributed as dist
from parallel_stand_ins import SHARDS
from torch import nn

from shoal.parallel import parallelize

STEPS = 3


class Branching(nn.Module):
    """One of two layers as the caller says, or both."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x, branch):
        if branch is None:
            return x + self.scale * (self.first(x) + self.second(x)).tanh()
        return x + self.scale * (self.first if branch else self.second)(x).tanh()


class Model(nn.Module):
    """Root parameters before and after the blocks; what is run is a parameter of forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Branching() for _ in range(4))
        self.head = nn.Linear(6, 6)
        self.other_head = nn.Linear(6, 6)

    def forward(self, x, run, branch=True, other=False):
        x = self.embed(x)
        for index in run:
            x = self.blocks[index](x, branch)
        return self.other_head(x) if other else self.head(x)


CASES = {
    "all of a block on one rank alone": [{"branch": None}, {"branch": False}],
    "one branch on each rank": [{"branch": True}, {"branch": False}],
    "one head on each rank": [{"other": False}, {"other": True}],
    "a block in the middle left out": [{}, {"run": (0, 1, 3)}],
    "the first block left out": [{"run": (1, 2, 3)}, {}],
    "the last block left out": [{}, {"run": (0, 1, 2)}],
    "no block in common": [{"run": (0, 2)}, {"run": (1, 3)}],
    "no block at all": [{}, {"run": ()}],
    "a block repeated": [{"run": (0, 1, 2, 3)}, {"run": (0, 1, 1, 1, 3)}],
    "another order on all": [{"run": (2, 3, 0, 1)}, {"run": (2, 3, 0, 1)}],
    "two rounds on all": [{"run": (0, 1, 2, 3, 0, 1, 2, 3)}, {"run": (0, 1, 3, 0, 2, 3)}],
    "other blocks in every step": [{"run": ((0, 1), (2, 3), (0, 3))}, {"run": ((1, 2), (0, 1, 2, 3), ())}],
}


def arguments(case, rank, step):
    chosen = {"run": (0, 1, 2, 3)} | CASES[case][rank]
    if chosen["run"] and isinstance(chosen["run"][0], tuple):
        chosen["run"] = chosen["run"][step]
    return chosen


def inputs(rank, step, micro):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def train(plan, case):
    torch.manual_seed(0)
    parallel = parallelize(Model(), plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    rank = dist.get_rank()
    for step in range(STEPS):
        with parallel.accumulate():  # one micro-batch in which all ranks are alike
            parallel(inputs(rank, step, 0), (0, 1, 2, 3)).square().mean().backward()
        parallel(inputs(rank, step, 1), **arguments(case, rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with parallel.gathered():
        return {name: value.detach().clone() for name, value in parallel.module.named_parameters()}


def train_plainly(case):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(2):
            (model(inputs(rank, step, 0), (0, 1, 2, 3)).square().mean() / 2).backward()
            (model(inputs(rank, step, 1), **arguments(case, rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shard", SHARDS)
def test_ranks_that_run_unlike_parts_train_as_one_process_does(ranks, shard, case):
    expected = train_plainly(case)
    for weights in ranks.run(train, 2, f"dp=2,shard={shard}", case):
        for name, value in expected.items():  # fp32 sums in another order
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
