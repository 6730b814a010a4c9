"""Models that torch.compile has compiled, whole or block by block, under every sharding."""

import pytest
import torch
from parallel_stand_ins import SHARDS
from torch import nn

from shoal.parallel import parallelize


class Model(nn.Module):
    """Two blocks between layers of the root, one of whose weights is a parameter of the model itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)
        )
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.gain * x


def train(plan, compiled):
    """Losses of steps of two micro-batches, and of forwards without gradients between them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    parallel = forward = parallelize(Model(), plan)
    if compiled == "model":
        forward = torch.compile(parallel, backend="eager")
    for block in parallel.module.blocks if compiled == "blocks" else ():
        block.compile(backend="eager")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.3)
    losses = []
    for number in range(3):
        first, second = parallel.local(
            torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        ).chunk(2)
        with parallel.accumulate():
            forward(first).square().mean().backward()
        loss = forward(second).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), forward(first).square().mean().item()]
    return losses


@pytest.mark.parametrize("compiled", ["blocks", "model"])
@pytest.mark.parametrize("shard", SHARDS)
def test_what_is_compiled_trains_as_what_is_not(ranks, shard, compiled):
    plan = f"dp=2,shard={shard}"
    for losses, expected in zip(
        ranks.run(train, 2, plan, compiled), ranks.run(train, 2, plan, ""), strict=True
    ):
        assert losses == pytest.approx(expected, rel=1e-5)
