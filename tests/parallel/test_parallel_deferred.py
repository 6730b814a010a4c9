"""A backward in two halves gives the gradients of a whole one, whatever the layers are wrapped in."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from shoal.errors import TrainingError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.parallel.compiled import compile_blocks
from shoal.parallel.pipeline.split_backward import Deferral, deferred_linear, put_off_products, split_backward

SHAPE = {"vocab_size": 61, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 12}
EXPERTS = {"experts": 4, "experts_per_token": 2}
HIDDEN = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
GRADIENT = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))


pytestmark = pytest.mark.usefixtures("one_thread")


class Blocks(nn.Sequential):
    """A transformer's blocks, without its embedding and its head."""

    def __init__(self, model):
        super().__init__(*model.blocks)
        self.angles = model.rotary(HIDDEN.shape[1], HIDDEN.device)

    def forward(self, hidden):
        for block in self:
            hidden = block(hidden, self.angles)
        return hidden


def blocks(policy="none", **changes):
    model = Transformer(TransformerConfig(**(SHAPE | changes)))
    model.initialize(0)
    compile_blocks(list(model.blocks), policy)
    return Blocks(model)


def whole(stage):
    hidden = HIDDEN.clone().requires_grad_()
    stage(hidden).backward(GRADIENT)
    return hidden.grad, gradients(stage)


def gradients(stage):
    return {name: each.grad for name, each in stage.named_parameters()}


def first_half(stage, deferral):
    hidden = HIDDEN.clone().requires_grad_()
    weights = split_backward(deferral, stage(hidden), GRADIENT)
    return hidden.grad, weights


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_while_a_deferral_is_off_a_backward_is_a_plain_one(policy):
    expected_hidden, expected = whole(blocks(policy, **EXPERTS))
    stage, deferral = blocks(policy, **EXPERTS), Deferral()
    put_off_products(stage, deferral)
    with deferral.off():
        hidden, found = whole(stage)
    torch.testing.assert_close(hidden, expected_hidden)
    same(found, expected)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("changes", [{}, EXPERTS, EXPERTS | {"capacity": 0.8, "z_weight": 0.1}], ids=str)
def test_the_halves_give_what_a_whole_backward_gives(policy, changes):
    expected_hidden, expected = whole(blocks(policy, **changes))
    stage, deferral = blocks(policy, **changes), Deferral()
    put_off_products(stage, deferral)
    received, weights = first_half(stage, deferral)
    # the same products, in the same order
    torch.testing.assert_close(received, expected_hidden, rtol=0, atol=0)
    missing = {name for name, gradient in gradients(stage).items() if gradient is None}
    products = {"query", "key", "value", "output", "gate", "up", "down"} | ({"router"} if changes else set())
    assert {name.removesuffix(".weight").rpartition(".")[-1] for name in missing} == products
    weights.run()
    same(gradients(stage), expected)


def test_halves_of_several_micro_batches_may_come_in_any_order():
    reference = blocks()
    for _ in range(3):
        _, expected = whole(reference)
    stage, deferral = blocks(), Deferral()
    put_off_products(stage, deferral)
    halves = [first_half(stage, deferral)[1] for _ in range(3)]
    for half in reversed(halves):
        half.run()
    same(gradients(stage), expected)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=str)
def test_hooks_find_each_gradient_complete_once_in_the_order_of_backward(changes):
    def hooked(stage):
        seen = []
        for name, parameter in stage.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda each, name=name: seen.append(name))
        return seen

    reference = blocks(**changes)
    expected = hooked(reference)
    whole(reference)
    stage, deferral = blocks(**changes), Deferral()
    put_off_products(stage, deferral)
    seen = hooked(stage)
    _, weights = first_half(stage, deferral)
    assert seen == [name for name in expected if "norm" in name]
    seen.clear()
    weights.run()
    assert seen == [name for name in expected if "norm" not in name]


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=str)
def test_each_weight_s_operands_are_freed_when_its_gradient_is_there(changes):
    stage, deferral = blocks(**changes), Deferral()
    put_off_products(stage, deferral)
    _, weights = first_half(stage, deferral)
    inputs = [weakref.ref(compute.args[1]) for compute, *_ in weights._parts]
    alive = []
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda each: alive.append(sum(operand() is not None for operand in inputs))
        )
    weights.run()
    # Seven products in each of two blocks, and a router's; gate and up, and query, key and value, have one
    # input each. The engine holds the last one's operands until it comes to the next.
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= 3
    gc.collect()
    assert not any(operand() is not None for operand in inputs)


class Conv1D(nn.Module):
    """As transformers', whose weight is `[in, out]`."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


@pytest.mark.parametrize("layer", [lambda: Conv1D(32, 32), lambda: nn.Linear(32, 32)])
@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight",)])
def test_biases_transposed_weights_and_frozen_parameters(layer, frozen):
    torch.manual_seed(0)
    reference = layer()
    stage = layer()
    stage.load_state_dict(reference.state_dict())
    for module in (reference, stage):
        for name in frozen:
            getattr(module, name).requires_grad_(False)
    expected_hidden, expected = whole(reference)
    deferral = Deferral()
    put_off_products(stage, deferral)
    received, weights = first_half(stage, deferral)
    weights.run()
    torch.testing.assert_close(received, expected_hidden)
    known = {name for name, value in expected.items() if value is not None}
    same({name: gradients(stage)[name] for name in known}, {name: expected[name] for name in known})
    assert known == {name for name, value in gradients(stage).items() if value is not None}


def test_a_head_that_is_the_embedding_s_weight_is_put_off():
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))

    def build():
        model = Transformer(TransformerConfig(**SHAPE, tie_embeddings=True))
        model.initialize(0)
        return model

    reference, model, deferral = build(), build(), Deferral()
    reference(tokens).logsumexp(-1).mean().backward()
    put_off_products(model, deferral)
    loss = get_gradient_edge(model(tokens).logsumexp(-1).mean())
    weights = split_backward(deferral, loss, None)
    looked_up = model.embed.weight.grad.clone()
    weights.run()
    assert not torch.equal(model.embed.weight.grad, looked_up)
    same(gradients(model), gradients(reference))


def test_two_products_of_one_weight_are_added_up():
    weight = nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(3)))
    calls = []
    weight.register_post_accumulate_grad_hook(calls.append)
    deferral = Deferral()

    def twice(hidden):
        inner = deferred_linear(hidden, weight.narrow(0, 0, 32), None, deferral)
        return deferred_linear(inner, weight, None, deferral)

    hidden = HIDDEN.clone().requires_grad_()
    weights = split_backward(deferral, twice(hidden), GRADIENT)
    weights.run()
    assert len(calls) == 1
    found, weight.grad = weight.grad, None
    (HIDDEN @ weight.T @ weight.T).backward(GRADIENT)
    torch.testing.assert_close(found, weight.grad, rtol=1e-5, atol=1e-4)  # fp32 sums of 24 x 32 products


def test_a_plain_backward_is_refused_rather_than_losing_gradients():
    stage, deferral = blocks(), Deferral()
    put_off_products(stage, deferral)
    output = stage(HIDDEN.clone().requires_grad_())
    with pytest.raises(TrainingError, match="outside of `split_backward`"):
        output.backward(GRADIENT)


def test_a_stage_with_nothing_to_train_has_nothing_put_off():
    split_backward(Deferral(), None, None).run()


def test_without_a_gradient_to_the_input_the_product_is_a_plain_one():
    stage, deferral = nn.Linear(32, 32), Deferral()
    put_off_products(stage, deferral)
    stage(HIDDEN).backward(GRADIENT)
    assert stage.weight.grad is not None


def train_in_halves(text, halves):
    """The owned gradients after two micro-batches of data parallelism, and what they are of."""
    model = Transformer(TransformerConfig(**SHAPE))
    model.initialize(0)
    parallel = parallelize(model, text)
    parallel.set_micro_batches(2)
    deferral = Deferral()
    if halves:
        put_off_products(model, deferral)
    pending = []
    for number in range(2):
        tokens = torch.randint(
            61, (2, 13), generator=torch.Generator().manual_seed(dist.get_rank() + 2 * number)
        )
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
        "dp=2",
        "dp=2,shard=zero1",
        "dp=2,shard=zero2,bucket=16KiB",
        "dp=2,shard=zero3",
        "dp=2,shard=zero3-once",
    ],
)
def test_gradients_are_reduced_over_ranks_in_the_second_half(ranks, text):
    expected = ranks.run(train_in_halves, 2, text, False)
    for found, reference in zip(ranks.run(train_in_halves, 2, text, True), expected, strict=True):
        same(found, reference)
