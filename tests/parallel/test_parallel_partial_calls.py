"""Calls of torch that need whole gradients: right where a rank has them, refused by name where not."""

import pytest
import torch
import torch.distributed as dist
from parallel_stand_ins import one_step, tokens, transformer
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from shoal.errors import LayoutError
from shoal.models import build, next_token_loss
from shoal.parallel import parallelize
from shoal.spec.plan import Plan
from shoal.testing import run_ranks

LIMIT, MOST = 0.05, 1e-3


def backward(plan):
    parallel = parallelize(transformer(), plan)
    if parallel.plan.pp > 1:
        batch = tokens()
        parallel.forward_backward(iter([(batch[:, :-1], batch[:, 1:])]), 1, next_token_loss)
    else:
        one_step(parallel, tokens())
    return parallel


def refused(call):
    with pytest.raises(LayoutError, match=r"clip_gradients\(limit\)"):
        call()


def clip_parts(plan):
    parallel = backward(plan)
    before = [each.grad.clone() for each in parallel.parameters()]
    gradients = [each.grad for each in parallel.parameters()]
    refused(lambda: clip_grad_norm_(parallel.parameters(), LIMIT))
    refused(lambda: torch.nn.utils.clip_grad.clip_grad_norm_(list(parallel.parameters()), LIMIT, 1.0))
    refused(lambda: get_total_norm(gradients))
    refused(lambda: get_total_norm(tensors=gradients, norm_type=1.0))
    refused(lambda: clip_grads_with_norm_(parallel.parameters(), LIMIT, torch.ones(())))
    refused(lambda: clip_grad_norm_([each for each in parallel.parameters() if each.dim() == 2], LIMIT))
    for each, gradient in zip(parallel.parameters(), before, strict=True):
        assert torch.equal(each.grad, gradient)
        each.grad = gradient  # as those do who replace gradients
    refused(lambda: clip_grad_norm_(parallel.parameters(), LIMIT))
    parallel.clip_gradients(LIMIT)
    return parallel.gradient_norm()


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "dp=2,ep=2", "dp=2,ep=2,shard=zero2"])
def test_the_norm_of_a_rank_s_parts_is_refused(ranks, plan):
    clipped = ranks.run(clip_experts if "ep" in plan else clip_parts, 2, plan)
    assert clipped == pytest.approx([LIMIT] * 2, rel=1e-5)


def clip_experts(plan):
    model = build("tiny-experts", overrides={"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "seq": 16})
    parallel = parallelize(model, plan)
    one_step(parallel, tokens(dist.get_rank()))
    refused(lambda: clip_grad_norm_(parallel.parameters(), LIMIT))
    parallel.clip_gradients(LIMIT)
    return parallel.gradient_norm()


def clip_whole(plan):
    parallel = backward(plan)
    norm = clip_grad_norm_(parallel.parameters(), LIMIT)
    clip_grad_value_(parallel.parameters(), MOST)
    norm = norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()
    return norm, [(each.name, each.start, each.gradient.flatten()) for each in parallel.owned]


@pytest.mark.parametrize(
    "plan", ["", "dp=2", "dp=2,shard=zero1", "dp=2,shard=zero3", "dp=4,shard=zero2,replicate=2"]
)
def test_torch_clips_where_gradients_are_whole_or_dtensors(plan):
    alone = transformer()
    one_step(alone, tokens())
    wanted = clip_grad_norm_(alone.parameters(), LIMIT)
    clip_grad_value_(alone.parameters(), MOST)
    gradients = {name: each.grad.flatten() for name, each in alone.named_parameters()}
    # In fresh processes: torch caches meshes of DTensors with the groups of an earlier call.
    for norm, parts in run_ranks(clip_whole, Plan.parse(plan).ranks, plan, backend="shoal"):
        assert norm == pytest.approx(wanted.item(), rel=1e-5)  # sums in another order
        for name, start, part in parts:
            torch.testing.assert_close(part, gradients[name][start:][: len(part)], rtol=1e-4, atol=1e-7)


def clip_values(plan):
    parallel = backward(plan)
    clip_grad_value_(parallel.parameters(), MOST)
    return max(each.grad.abs().max().item() for each in parallel.parameters())


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_values_are_clipped_under_every_plan(ranks, plan):
    assert ranks.run(clip_values, 2, plan) == [pytest.approx(MOST)] * 2


def ask_for_gradients(plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallel = parallelize(model, plan)
    inputs = torch.randn(2, 4, requires_grad=True)
    loss = parallel(inputs).square().mean()
    for given in (list(parallel.parameters()), list(model.parameters())[:1]):
        with pytest.raises(LayoutError, match="would be one rank's"):
            torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True)
        with pytest.raises(LayoutError, match="would be one rank's"):
            loss.backward(inputs=given, retain_graph=True)
    (of_inputs,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    loss.backward()
    assert torch.equal(of_inputs, inputs.grad)
    return True


@pytest.mark.parametrize("shard", ["none", "zero2", "zero3"])
def test_gradients_of_one_rank_s_samples_are_refused(ranks, shard):
    assert all(ranks.run(ask_for_gradients, 2, f"dp=2,shard={shard}"))


def test_one_device_gives_gradients_of_parameters():
    parallel = parallelize(nn.Linear(4, 4), "")
    gradients = torch.autograd.grad(parallel(torch.ones(1, 4)).sum(), list(parallel.parameters()))
    assert torch.equal(gradients[1], torch.ones(4))
