"""Recompute in some of the blocks: trainings have the bits of those without."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from offload_stand_ins import trained
from torch import nn

from shoal.models import Transformer, TransformerConfig
from shoal.parallel.compiled import compile_blocks
from shoal.parallel.plain_state import StatesBefore
from shoal.spec.plan import Plan, block_choices
from shoal.spec.plan.allowed_values import Recompute


@pytest.mark.parametrize(
    ("plan", "recompute"),
    [
        ("dp=1", "full:1"),
        ("dp=1,microbatch=2,precision=bf16", "selective:2"),
        ("dp=2,shard=zero3,microbatch=2", "full:2"),
        ("dp=1,pp=2,microbatch=2,schedule=zb-h1", "full:2"),
    ],
)
def test_recompute_in_some_blocks_changes_no_bit(ranks, tmp_path, plan, recompute):
    size = Plan.parse(plan).ranks
    (losses, state), other = (
        trained(text, tmp_path) if size == 1 else ranks.run(trained, size, text, tmp_path)[0]
        for text in (plan, f"{plan},recompute={recompute}")
    )
    assert other[0] == losses
    for name, value in state.items():
        assert torch.equal(other[1][name], value), name


class Counted(nn.Linear):
    """A block whose forwards are counted, outside of its state."""

    def __init__(self, calls):
        super().__init__(4, 4)
        self.note = lambda: calls.update([id(self)])

    def forward(self, values):
        self.note()
        return super().forward(values)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("again", [(), (0,), (0, 2), (0, 1, 2)])
def test_the_blocks_that_recompute_are_made_again(policy, again):
    calls = Counter()
    blocks = [Counted(calls) for _ in range(3)]
    compile_blocks(blocks, policy, again=again)
    values = torch.ones(2, 4, requires_grad=True)
    for block in blocks:
        values = block(values).relu()
    values.sum().backward()
    assert [calls[id(block)] for block in blocks] == [1 + (number in again) for number in range(3)]


class Noisy(nn.Module):
    """Multiplies what a module returns by noise."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments, **named):
        result = self.inner(*arguments, **named)
        return result * torch.rand_like(result).add(0.5)


def dropped(function):
    return lambda *arguments, **named: F.dropout(function(*arguments, **named), 0.3)


def put_a_module(block):
    block.attention = Noisy(block.attention)


def put_a_hook(block):
    block.feed_forward.register_forward_hook(lambda module, arguments, output: F.dropout(output, 0.3))


def put_a_forward(block):
    block.attention.forward = dropped(block.attention.forward)


def put_an_attend(block):
    block.attention.attend = dropped(block.attention.attend)


def raise_the_probability(block):
    block.attention_dropout.p = 0.3


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "change", [put_a_module, put_a_hook, put_a_forward, put_an_attend, raise_the_probability]
)
def test_recomputing_draws_the_same_random_numbers_whatever_draws_them(policy, is_late, change):
    shape = {"vocab_size": 7, "layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 8, "seq": 4}

    def gradients(recompute):
        model = Transformer(TransformerConfig(**shape))
        model.initialize(0)
        if not is_late:
            for block in model.blocks:
                change(block)
        compile_blocks(list(model.blocks), recompute)
        if is_late:
            for block in model.blocks:
                change(block)
        torch.manual_seed(0)
        model(torch.arange(4).expand(3, -1)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for expected, found in zip(gradients("none"), gradients(policy), strict=True):
        assert torch.equal(found, expected)


def test_a_block_of_another_class_draws_the_same_again():
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compile_blocks([block], "full")
    values = torch.ones(2, 4, requires_grad=True)
    result = block(values)
    torch.rand(3)
    result.sum().backward()
    is_kept = result.detach() != 0
    assert torch.equal(block[0].bias.grad, 2.0 * is_kept.sum(0))


class Counts(nn.Module):
    """Adds what a buffer and a number beside it say, and counts its forwards in both."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.number = 0

    def forward(self, values):
        self.number += 1
        self.seen = self.seen + 1  # another tensor, where a batch norm changes its own
        return values * (1 + 0.1 * self.seen) + 0.1 * self.number


class Unregistered(nn.Module):
    """Keeps all that its forwards change in attributes, under names of all kinds."""

    def __init__(self):
        super().__init__()
        self.number, self._warmth = 0, 1.0
        self.seen, self.table = [], {"lengths": [0], "cached": None}
        self.mean, self.queue = torch.zeros(6), torch.zeros(6)

    def forward(self, values):
        self.number += 1
        self._warmth *= 0.9
        self.seen.append(float(values.detach().mean()))
        self.table["lengths"].append(len(self.seen))
        self.table["cached"] = values.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * values.detach().mean(0)  # another tensor
        self.queue.mul_(0.9).add_(values.detach().mean(0))  # the same one
        if not hasattr(self, "first"):
            self.first = values.detach().mean()
        factor = self._warmth + 0.1 * len(self.seen) + 0.01 * self.table["lengths"][-1] + self.first
        return values * factor + self.mean + self.queue + self.table["cached"] + 0.1 * self.number


def changing():
    """Three blocks whose forwards change their state in each of the ways that modules have."""
    torch.manual_seed(0)

    def block():
        normed = [nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)]
        inner = [nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), *normed, Counts(), Unregistered()]
        inner.append(nn.Tanh())
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(*inner))

    return nn.Sequential(*(block() for _ in range(3)))


def gradients_and_state(recompute, retain):
    """Gradients, buffers and numbers after steps whose backwards follow both forwards, as in a pipeline."""
    model = changing()
    compile_blocks(list(model), recompute)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        losses = [model(torch.randn(5, 6, generator=generator)).square().sum() for _ in range(2)]
        with torch.no_grad():
            model(torch.randn(5, 6, generator=generator))
        for loss in losses:
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
    numbers = [module.number for module in model.modules() if isinstance(module, Counts | Unregistered)]
    numbers += [len(module.seen) for module in model.modules() if isinstance(module, Unregistered)]
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return named | {name: buffer.clone() for name, buffer in model.named_buffers()}, numbers


@pytest.mark.parametrize(("policy", "retain"), [("full", False), ("full", True), ("selective", False)])
def test_a_forward_that_is_run_again_finds_the_state_of_the_first_and_leaves_none(policy, retain):
    expected, counted = gradients_and_state("none", retain)
    found, numbers = gradients_and_state(policy, retain)
    assert numbers == counted == [6] * 9
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_buffers_that_do_not_change_are_copied_once():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    block.register_buffer("mask", torch.ones(4))
    states = StatesBefore(block)
    block.attribute = torch.ones(4)
    (_, first, own), (_, second, other) = states.take()[0], states.take()[0]
    assert first["mask"].copy is second["mask"].copy
    assert own["attribute"].copy is other["attribute"].copy


def test_an_attribute_that_each_forward_sets_is_not_copied():
    block = nn.Linear(4, 4)
    states = StatesBefore(block)
    for number in range(3):
        block.last = torch.full((4,), float(number))
        taken = states.take()[0][2]["last"]
    assert taken.copy is block.last


def test_a_stage_has_its_share_of_the_number_rounded_up():
    some = Recompute.parse("full:8")
    assert [some.count(blocks, 24) for blocks in (24, 12, 7, 3, 0)] == [8, 4, 3, 1, 0]
    assert Recompute.parse("full:99").count(12, 24) == 12
    assert Recompute.parse("selective").count(5, 24) == 5
    assert Recompute.parse("none").count(5, 24) == 5


@given(blocks=st.integers(1, 12), recomputed=st.integers(1, 12), stored=st.integers(1, 12))
def test_blocks_in_files_are_spread_evenly_and_the_first_others_recompute(blocks, recomputed, stored):
    plan = Plan.parse(f"recompute=full:{recomputed},offload=activations:file:{stored}")
    again, in_files = block_choices(plan, blocks, 12)
    assert len(again) == plan.recomputed.count(blocks, 12)
    assert len(in_files) == min(blocks, -(-stored * blocks // 12))
    for first in range(blocks + 1):
        assert len([each for each in in_files if each < first]) == math.ceil(first * len(in_files) / blocks)
    others = [each for each in range(blocks) if each not in in_files]
    assert again.intersection(others) == set(others[: len(again)])
    assert again.intersection(in_files) == set(sorted(in_files)[: max(0, len(again) - len(others))])
