"""A backward in two halves gives experts and their router what a whole one gives, on any number of ranks."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from parallel_stand_ins import assembled

from shoal.models import Mixture, Transformer, TransformerConfig, grouped_matmul, next_token_loss
from shoal.models.grouped_matmul import Runs
from shoal.parallel import parallelize
from shoal.parallel.compiled import compile_blocks
from shoal.parallel.pipeline.split_backward import (
    Deferral,
    deferred_experts,
    put_off_products,
    split_backward,
)
from shoal.spec.plan import Plan

SHAPE = TransformerConfig(
    vocab_size=61,
    layers=4,
    hidden=16,
    heads=2,
    kv_heads=2,
    ffn=24,
    seq=12,
    experts=4,
    experts_per_token=2,
    balance_weight=0.1,
    z_weight=0.01,
)
PARTS = ("router.weight", "gate", "up", "down")

pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def backward(halves, dtype=torch.float32, policy="none", trained=PARTS, lopsided=False):
    """Gradients by name after both halves or a whole backward, and the names of those that come first."""
    layer = Mixture(SHAPE)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed) * 0.4)
        if lopsided:
            layer.router.weight[2:] = 0  # two experts get no rows
            layer.router.weight[:2] = 1
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    layer.to(dtype)
    compile_blocks([layer], policy)
    hidden = random(2, 12, 16, seed=10).to(dtype)
    hidden = (hidden.abs() if lopsided else hidden).requires_grad_()
    gradient = random(2, 12, 16, seed=11).to(dtype)
    if halves:
        deferral = Deferral()
        put_off_products(layer, deferral)
        weights = split_backward(deferral, layer(hidden), gradient)
    else:
        layer(hidden).backward(gradient)
    early = {name for name, each in layer.named_parameters() if each.grad is not None}
    if halves:
        weights.run()
    return {name: each.grad for name, each in (*layer.named_parameters(), ("hidden", hidden))}, early


def assert_same_bits(found, expected):
    """The halves compute the same products, and add them up in the same order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("grouped", [False, True], ids=["looped", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("lopsided", [False, True], ids=["spread", "lopsided"])
def test_the_halves_give_bit_for_bit_what_a_whole_backward_gives(
    monkeypatch, grouped, dtype, policy, lopsided
):
    monkeypatch.setattr(grouped_matmul, "_can_group", lambda rows, weight: grouped)
    expected, _ = backward(False, dtype, policy, lopsided=lopsided)
    found, early = backward(True, dtype, policy, lopsided=lopsided)
    assert not early
    assert_same_bits(found, expected)
    if lopsided:
        assert not any(bool(found[name][2:].any()) for name in ("gate", "up", "down"))


@pytest.mark.parametrize("frozen", PARTS)
def test_what_is_frozen_has_no_gradient_and_the_rest_has_its_own(frozen):
    trained = [name for name in PARTS if name != frozen]
    expected, _ = backward(False, trained=trained)
    found, early = backward(True, trained=trained)
    assert not early
    assert found[frozen] is None
    assert_same_bits(found, expected)


def test_gradients_of_several_micro_batches_are_added_up():
    weights = [torch.nn.Parameter(random(4, out, 8, seed=out)) for out in (5, 6)]
    counts = torch.tensor([3, 0, 7, 2])
    rows = [random(12, 8, seed=seed) for seed in range(3)]
    deferral = Deferral()
    halves = []
    for part in rows:
        results = deferred_experts(part.clone().requires_grad_(), Runs(counts), weights, deferral)
        halves.append(split_backward(deferral, torch.cat(results, 1).square().sum(), None))
    for half in reversed(halves):
        half.run()
    whole = [weight.detach().clone().requires_grad_() for weight in weights]
    for part in rows:
        runs = zip(part.split(counts.tolist()), *whole, strict=True)
        sum(
            (run @ one.T).square().sum() + (run @ other.T).square().sum() for run, one, other in runs
        ).backward()
    for weight, reference in zip(weights, whole, strict=True):
        # sums of 12 products of fp32 in another order
        torch.testing.assert_close(weight.grad, reference.grad, rtol=1e-5, atol=1e-4)


def test_under_autocast_and_without_a_gradient_to_the_rows_products_are_plain():
    weight = torch.nn.Parameter(random(4, 5, 8, seed=0))
    counts = torch.tensor([3, 0, 7, 2])
    rows = random(12, 8, seed=1)
    (result,) = deferred_experts(rows, Runs(counts), [weight], Deferral())
    result.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        (cast,) = deferred_experts(rows.requires_grad_(), Runs(counts), [weight], Deferral())
    assert cast.dtype == torch.bfloat16
    once = weight.grad.clone()
    cast.sum().backward()
    # Twice the same gradient, the second time from operands rounded to bf16's 8 bits.
    torch.testing.assert_close(weight.grad, 2 * once, rtol=0.02, atol=0.02)


def train_in_halves(text, halves):
    """The owned gradients after two micro-batches, whose second halves come last, or with whole backwards."""
    model = Transformer(SHAPE)
    model.initialize(0)
    parallel = parallelize(model, text)
    parallel.set_micro_batches(2)
    deferral = Deferral()
    if halves:
        put_off_products(model, deferral)
    pending = []
    for number in range(2):
        seed = dist.get_rank() + 2 * number
        tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(seed))
        loss = next_token_loss(parallel(tokens[:, :-1]), tokens[:, 1:]) / 2
        if halves:
            with parallel.accumulate():
                pending.append(split_backward(deferral, loss, None))
        else:
            with parallel.accumulate() if number == 0 else nullcontext():
                loss.backward()
    for number, weights in enumerate(pending):
        with parallel.accumulate() if number == 0 else nullcontext():
            weights.run()
    return {name: each.grad.clone() for name, each in parallel.named_parameters()}


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,ep=2",
        "dp=2,ep=2,recompute=full",
        "dp=2,ep=2,recompute=selective,shard=zero1",
        "dp=2,shard=zero3",
        "dp=2,ep=2,precision=bf16",
    ],
)
def test_experts_on_ranks_have_their_gradients_after_the_second_half(ranks, text):
    expected = ranks.run(train_in_halves, 2, text, False)
    for found, reference in zip(ranks.run(train_in_halves, 2, text, True), expected, strict=True):
        assert_same_bits(found, reference)


def gradients_of_a_step(text):
    """What this rank owns of the gradients after a step of four micro-batches, as `assembled` takes it."""
    model = Transformer(SHAPE)
    model.initialize(0)
    parallel = parallelize(model, text)
    tokens = parallel.local(torch.randint(61, (8, 13), generator=torch.Generator().manual_seed(0)))
    pairs = [(part[:, :-1], part[:, 1:]) for part in tokens.split(len(tokens) // 4)]
    parallel.forward_backward(iter(pairs), len(pairs), next_token_loss)
    return [
        (each.name, each.shape, each.start, each.stop, each.cut, each.gradient.clone())
        for each in parallel.owned
    ]


@pytest.mark.parametrize(
    ("settings", "schedule"),
    [
        ("pp=2,recompute=full", "zb-h1"),
        ("pp=2,precision=bf16", "zb-v"),
        ("pp=2,recompute=selective,precision=bf16", "dualpipe-v"),
        ("dp=2,pp=2,ep=2", "zb-h1"),
        ("dp=2,pp=2,ep=2,recompute=full,shard=zero1", "zb-v"),
        ("dp=2,pp=2,ep=2,recompute=selective,shard=zero3", "zb-v"),
        ("dp=2,pp=2,ep=2,shard=zero3-once", "zb-v"),
        ("tp=2,pp=2,tensor=plain", "dualpipe-v"),
        ("tp=2,pp=2,tensor=sequence,recompute=full", "zb-h1"),
    ],
)
def test_a_schedule_with_halves_gives_the_gradients_of_one_without(ranks, settings, schedule):
    plan = Plan.parse(settings)
    expected = assembled(ranks.run(gradients_of_a_step, plan.ranks, f"{settings},schedule=gpipe"))
    found = assembled(ranks.run(gradients_of_a_step, plan.ranks, f"{settings},schedule={schedule}"))
    assert found.keys() == expected.keys()
    # Micro-batches are added up in one order; but zero3 adds up over ranks in between, bucket by bucket.
    tolerance = 1e-6 if plan.shard == "zero3" else 0.0
    for name, value in expected.items():
        limit = tolerance * value.abs().max().item()
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )
