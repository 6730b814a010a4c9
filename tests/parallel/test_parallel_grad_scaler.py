"""torch's GradScaler under every Plan: what it skips, and by what it scales, as on one device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from shoal.parallel import LocalUpdates, Outer, parallelize

STEPS, BAD, EVERY = 6, 2, 2
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # fp32 sums in another order; scales are powers of 2
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Scaled(nn.Module):
    """A parameter without dims, which ranks do not share, beside others that they do."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs):
        return inputs * self.factor


def net():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Tanh(), nn.Linear(5, 5))
    return nn.Sequential(Scaled(), nn.Linear(6, 5), inner, nn.Linear(5, 3))


def samples(step, ranks):
    chance = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
    return torch.cat([torch.randn(4, 6, generator=each) for each in chance]), torch.cat(
        [torch.randn(4, 3, generator=each) for each in chance]
    )


class Training:
    """A model that a GradScaler trains; the gradient of one rank overflows in one step."""

    def __init__(self, model, optimizer, reads):
        self.model, self.optimizer, self.reads = model, optimizer, reads
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.scales = []

    def step(self, number, ranks):
        inputs, targets = samples(number, ranks)
        loss = mse_loss(self.model(inputs), targets) * (float("inf") if number == BAD and 0 in ranks else 1)
        self.scaler.scale(loss).backward()
        if self.reads:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scales.append(self.scaler.get_scale())


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_ranks(plan, name, reads):
    parallel = parallelize(net(), plan)
    optimizer = OPTIMIZERS[name](parallel.parameters())
    if "local" in plan:
        optimizer = LocalUpdates(parallel, optimizer, outer=Outer(1.0, 0.0, 0))
    training = Training(parallel, optimizer, reads)
    for step in range(STEPS):
        training.step(step, [dist.get_rank()])
    return {key: whole(each.detach()) for key, each in parallel.named_parameters()}, training.scales


@pytest.mark.parametrize(
    ("plan", "name", "reads"),
    [
        ("dp=2", "fused", False),
        ("dp=2,shard=zero1", "adamw", False),
        ("dp=2,shard=zero2", "fused", True),
        ("dp=2,shard=zero3", "sgd", True),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, plan, name, reads):
    model = net()
    alone = Training(model, OPTIMIZERS[name](model.parameters()), reads)
    for step in range(STEPS):
        alone.step(step, [0, 1])
    for found, scales in ranks.run(on_ranks, 2, plan, name, reads):
        torch.testing.assert_close(found, dict(model.named_parameters()), **CLOSE)
        assert scales == alone.scales


@pytest.mark.parametrize(("name", "reads"), [("adamw", True), ("fused", False), ("sgd", False)])
def test_a_worker_that_skips_a_local_step_merges_with_the_others(ranks, name, reads):
    models = [net(), net()]
    alone = [Training(each, OPTIMIZERS[name](each.parameters()), reads) for each in models]
    for step in range(STEPS):
        for rank, each in enumerate(alone):
            each.step(step, [rank])
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for one, other in zip(*(each.parameters() for each in models), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    told = ranks.run(on_ranks, 2, f"dp=2,exchange=local,every={EVERY}", name, reads)
    for (found, scales), each in zip(told, alone, strict=True):
        torch.testing.assert_close(found, dict(models[0].named_parameters()), **CLOSE)
        assert scales == each.scales


def overflow_of_a_part(plan, name, reads):
    """Whether each step changed anything here, and the scales; one rank overflows in the second."""
    from shoal.models import Transformer, TransformerConfig, next_token_loss

    shape = {"vocab_size": 32, "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 24, "seq": 8}
    model = Transformer(TransformerConfig(**shape))
    model.initialize(0)
    parallel = parallelize(model, plan)
    optimizer = OPTIMIZERS[name](parallel.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    scaler.scale(torch.ones(()))  # makes the scale where a stage computes no loss
    batch = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
    changed, scales = [], []
    for step in range(3):
        pairs = ((part[:, :-1], part[:, 1:]) for part in batch.split(2))
        parallel.forward_backward(pairs, 2, lambda *pair: scaler.scale(next_token_loss(*pair)))
        if step == 1 and dist.get_rank() == 1:
            next(each.grad for each in parallel.parameters() if each.grad.dim() == 2)[0, 0] = float("inf")
        before = [each.detach().clone() for each in parallel.parameters()]
        if reads:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pairs = zip(before, parallel.parameters(), strict=True)
        changed.append(not all(torch.equal(one, other) for one, other in pairs))
        scales.append(scaler.get_scale())
    return changed, scales


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
@pytest.mark.parametrize(("name", "reads"), [("adamw", False), ("fused", False), ("sgd", True)])
def test_ranks_that_hold_parts_of_a_state_skip_a_step_together(ranks, plan, name, reads):
    for changed, scales in ranks.run(overflow_of_a_part, 2, plan, name, reads):
        assert changed == [True, False, True]
        assert scales == [64.0, 32.0, 32.0]
