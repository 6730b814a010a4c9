"""Users' hooks on parameters get the final gradient, under every sharding, as on one device."""

import pytest
import torch
import torch.distributed as dist
from parallel_stand_ins import SHARDS
from torch import nn
from torch.nn.functional import mse_loss

from shoal.errors import LayoutError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize

LAYOUTS = [
    *(f"dp=2,shard={shard}" for shard in SHARDS),
    "dp=2,exchange=naive",
    "dp=2,shard=zero2,precision=bf16",
]
STEPS, MICRO_BATCHES = 3, 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 3))


def samples(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def stepping(optimizer_of):
    def step(parameter):
        optimizer_of[parameter].step()
        parameter.grad = None

    return step


def train_in_hooks(plan, when):
    """Steps an optimizer in each parameter's hook; returns the weights, and what hooks got in order."""
    model, got = net(), []
    plain = dict(model.named_parameters())

    def note(name, factor):
        def hook(gradient):
            got.append((name, whole(gradient).clone()))
            return gradient * factor

        return hook

    factors = {name: 0.5 if "weight" in name else 2.0 for name in plain}
    if when == "before":
        for name, each in plain.items():
            each.register_hook(note(name, factors[name]))
    parallel = parallelize(model, plan)
    targets = dict(model.named_parameters() if when == "on the model" else parallel.named_parameters())
    if when != "before":
        for name, each in targets.items():
            each.register_hook(note(name, factors[name]))
    optimizer_of = {each: torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in parallel.parameters()}
    for each in targets.values():
        each.register_post_accumulate_grad_hook(stepping(optimizer_of))
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            shares = [rank] if ranks == 2 else [0, 1]
            inputs, wanted = (
                torch.cat(each) for each in zip(*(samples(step, number, r) for r in shares), strict=True)
            )
            if number + 1 < MICRO_BATCHES:
                with parallel.accumulate():
                    (mse_loss(parallel(inputs).float(), wanted) / MICRO_BATCHES).backward()
            else:
                (mse_loss(parallel(inputs).float(), wanted) / MICRO_BATCHES).backward()
        assert all(each.grad is None for each in parallel.parameters())
    return {name: whole(each.detach()).clone() for name, each in parallel.named_parameters()}, got


def trained_alone():
    """The same without hooks and without Shoal."""
    model, got = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            inputs, wanted = (
                torch.cat(each) for each in zip(*(samples(step, number, r) for r in (0, 1)), strict=True)
            )
            (mse_loss(model(inputs), wanted) / MICRO_BATCHES).backward()
        for name, each in reversed(list(model.named_parameters())):
            got.append((name, each.grad.clone()))
            each.grad *= 0.5 if "weight" in name else 2.0
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}, got


@pytest.mark.parametrize("when", ["before", "after", "on the model"])
@pytest.mark.parametrize("plan", LAYOUTS)
def test_optimizers_in_hooks_train_as_one_device_with_the_final_gradient(ranks, plan, when):
    weights, got = trained_alone()
    # fp32 sums in another order; bf16 rounds inputs and gradients to 8 bits
    close = {"rtol": 0.05, "atol": 0.02} if "bf16" in plan else {"rtol": 1e-5, "atol": 1e-6}
    for found, hooked in ranks.run(train_in_hooks, 2, plan, when):
        torch.testing.assert_close(found, weights, **close)
        assert [name for name, _ in hooked] == [name for name, _ in got]
        torch.testing.assert_close([each for _, each in hooked], [each for _, each in got], **close)


class Forked(nn.Module):
    """Two paths, of which a forward takes one."""

    def __init__(self):
        super().__init__()
        self.paths = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, inputs, path):
        return self.paths[path](inputs)


def add_up(plan, hooked, removed):
    """Gradients of backwards that are not zeroed, with a hook that doubles them on some parameters."""
    torch.manual_seed(0)
    model, calls, seen = Forked(), [], []
    handle = model.paths[1].bias.register_hook(lambda gradient: gradient * 100)
    parallel = model if plan is None else parallelize(model, plan)
    if removed:
        handle.remove()
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for name, each in parallel.named_parameters():
        if hooked in name:
            each.register_hook(lambda gradient, name=name: calls.append(name) or 2 * gradient)
            each.register_post_accumulate_grad_hook(lambda each: seen.append(whole(each.grad).clone()))
    for step, (path, penalty) in enumerate([(0, 0), (1, 0), (0, 0), (1, 1)]):
        shares = [rank] if ranks == 2 else [0, 1]
        inputs, wanted = (
            torch.cat(each) for each in zip(*(samples(step, 0, r) for r in shares), strict=True)
        )
        loss = mse_loss(parallel(inputs, path), wanted)
        if penalty:
            # torch adds up a parameter's gradients before its hooks: the penalty's too
            loss = loss + sum(whole_sum(each.square()) for each in parallel.parameters())
        loss.backward(retain_graph=True)
    loss.backward()
    gradients = {name: whole(each.grad) for name, each in parallel.named_parameters()}
    return gradients, sorted(calls), seen


def whole_sum(tensor):
    return tensor.sum().full_tensor() if hasattr(tensor, "full_tensor") else tensor.sum()


@pytest.mark.parametrize("hooked", ["weight", "paths"])
@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize("shard", ["none", "zero1", "zero2"])
def test_hooks_get_the_new_gradient_and_what_was_there_before_stays(ranks, shard, hooked, removed):
    gradients, calls, seen = add_up(None, hooked, removed)
    for found, called, parts in ranks.run(add_up, 2, f"dp=2,shard={shard}", hooked, removed):
        torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-6)
        assert called == calls
        assert len(parts) == len(seen)


TIED = TransformerConfig(
    vocab_size=32, layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, seq=8, tie_embeddings=True
)


def hooked_pipeline(plan):
    """The gradient that each hook gets, and the final ones of this rank."""
    model = Transformer(TIED)
    model.initialize(0)
    parallel = parallelize(model, plan)
    got, after = {}, {}
    for name, each in parallel.named_parameters():
        each.register_hook(lambda gradient, name=name: got.setdefault(name, []).append(gradient.clone()))
        each.register_post_accumulate_grad_hook(
            lambda each, name=name: after.update({name: each.grad.clone()})
        )
    batch = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
    pairs = ((part[:, :-1], part[:, 1:]) for part in batch.split(2))
    parallel.forward_backward(pairs, 2, next_token_loss)
    return got, after, {name: each.grad for name, each in parallel.named_parameters()}


@pytest.mark.parametrize("plan", ["pp=2,schedule=gpipe", "pp=2,schedule=zb-h1", "tp=2,tensor=plain"])
def test_hooks_get_what_stages_and_parts_of_layers_end_with(ranks, plan):
    alone, _, _ = hooked_pipeline("")
    for got, after, final in ranks.run(hooked_pipeline, 2, plan):
        assert got.keys() == after.keys() == final.keys()
        for name, gradients in got.items():
            assert len(gradients) == 1
            assert torch.equal(gradients[0], final[name])
            assert torch.equal(after[name], final[name])
            if "pp" in plan:  # fp32 sums in another order
                torch.testing.assert_close(gradients[0], alone[name][0], rtol=1e-4, atol=1e-6)


def test_a_hook_that_returns_another_shape_is_refused():
    parallel = parallelize(nn.Linear(3, 2), "")
    parallel.module.weight.register_hook(lambda gradient: gradient.sum())
    with pytest.raises(LayoutError, match="a hook on weight returned a gradient of shape"):
        parallel(torch.ones(1, 3)).sum().backward()


def test_zero_grad_forgets_what_hooks_would_have_got():
    parallel, got = parallelize(nn.Linear(3, 2), ""), []
    parallel.module.bias.register_hook(lambda gradient: got.append(gradient.clone()))
    with parallel.accumulate():
        parallel(torch.ones(5, 3)).sum().backward()
    parallel.zero_grad()
    parallel(torch.ones(1, 3)).sum().backward()
    assert torch.equal(torch.stack(got), torch.ones(1, 2))
    assert torch.equal(parallel.module.bias.grad, torch.ones(2))
