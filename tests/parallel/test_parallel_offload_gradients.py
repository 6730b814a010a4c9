"""Gradients in files that hooks, a GradScaler or the user change: norms and steps are those of one device."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from shoal.parallel import OffloadedOptimizer, parallelize

STEPS, LIMIT, FACTORS = 5, 0.3, {"weight": 0.5, "bias": 2.0}
PLANS = [
    "dp=2,shard=zero1,offload=optimizer:file",
    "dp=2,shard=zero3,offload=optimizer:file+gradients:file",
    "dp=2,shard=zero3,offload=optimizer:file+gradients:file+parameters:file",
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 3))


def samples(step, rank):
    chance = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=chance), torch.randn(4, 3, generator=chance)


def change(model, how):
    """Register hooks on a model's parameters."""
    for name, each in model.named_parameters():
        factor = FACTORS[name.rpartition(".")[2]]
        if how == "hook":
            each.register_hook(lambda gradient, factor=factor: gradient * factor)
        if how == "hook in place":
            each.register_post_accumulate_grad_hook(partial(scale, factor=factor))


def scale(parameter, factor):
    parameter.grad.mul_(factor)


def steps(model, optimizer, how, inputs_of, clip):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=how == "scaler")
    norms = []
    for step in range(STEPS):
        inputs, wanted = inputs_of(step)
        scaler.scale(mse_loss(model(inputs), wanted)).backward()
        scaler.unscale_(optimizer)
        if how == "by hand":
            for name, each in model.named_parameters():
                scale(each, FACTORS[name.rpartition(".")[2]])
        norms.append(clip())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms


def on_ranks(plan, how, folder):
    model = net()
    parallel = parallelize(model, plan, offload_folder=folder)
    change(parallel, how)
    optimizer = OffloadedOptimizer(parallel, parallel.parameters(), torch.optim.AdamW, lr=1e-2, eps=1e-3)
    norms = steps(
        parallel,
        optimizer,
        how,
        lambda step: samples(step, dist.get_rank()),
        lambda: parallel.clip_gradients(LIMIT),
    )
    with parallel.gathered():
        return norms, {name: each.detach().clone() for name, each in model.named_parameters()}


def alone(how):
    model = net()
    change(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    def inputs_of(step):
        return tuple(torch.cat(pair) for pair in zip(samples(step, 0), samples(step, 1), strict=True))

    norms = steps(
        model,
        optimizer,
        how,
        inputs_of,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item(),
    )
    return norms, dict(model.named_parameters())


@pytest.mark.parametrize("how", ["hook", "hook in place", "by hand", "scaler"])
@pytest.mark.parametrize("plan", PLANS)
def test_changed_gradients_are_clipped_and_stepped_by_as_on_one_device(ranks, tmp_path, plan, how):
    norms, weights = alone(how)
    for found, values in ranks.run(on_ranks, 2, plan, how, tmp_path):
        assert found == pytest.approx(norms, rel=1e-5)  # fp32 sums in another order
        torch.testing.assert_close(values, weights, rtol=1e-5, atol=1e-6)
