"""Attention over a sequence that is spread over ranks is attention to the whole of it."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.errors import ModelError, PlanError
from shoal.models import Transformer, TransformerConfig
from shoal.parallel.communication import Axis
from shoal.parallel.compiled import compile_blocks
from shoal.parallel.context.context import context_parallel
from shoal.parallel.context.positions import (
    POSITIONS,
    contiguous_positions,
    local_sequence,
    local_sequences,
    require_sequence,
    zigzag_positions,
)
from shoal.parallel.context.ring_attention import ring_attention
from shoal.parallel.context.ulysses import ulysses_attention
from shoal.record import NullRecorder

ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
SMALL = TransformerConfig(vocab_size=61, layers=2, hidden=48, heads=6, kv_heads=2, ffn=80, seq=48)


def whole_axis():
    """One axis of all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Axis("cp", tuple(range(ranks)), rank, None, NullRecorder())


def axis_of(size, index=0):
    """An axis that is never communicated over."""
    axis = Axis("cp", (0,), 0, None, NullRecorder())
    axis.size, axis.index = size, index
    return axis


# -- positions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [zigzag_positions, contiguous_positions])
@pytest.mark.parametrize(("seq", "size"), [(24, 1), (24, 2), (24, 3), (64, 8)])
def test_every_position_is_on_one_rank(positions, seq, size):
    parts = [positions(seq, size, index) for index in range(size)]
    assert {len(part) for part in parts} == {seq // size}
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(seq))
    assert all(torch.equal(part, part.sort().values) for part in parts)


def test_zigzag_gives_every_rank_equally_many_pairs_of_positions_to_attend():
    pairs = {int((zigzag_positions(48, 4, index) + 1).sum()) for index in range(4)}
    assert pairs == {48 * 49 // 2 // 4}


def test_a_sequence_that_cannot_be_cut_is_refused_with_the_multiple():
    tokens = torch.zeros(2, 36, dtype=torch.int64)
    with pytest.raises(PlanError, match=r"36 tokens cannot be cut for cp=4(.|\n)*a multiple of 8 tokens"):
        local_sequence(tokens, axis_of(4), "ring")
    with pytest.raises(PlanError, match="a multiple of 5 tokens"):
        local_sequence(tokens, axis_of(5), "ulysses")
    with pytest.raises(PlanError, match=r"use sequence=40$"):
        require_sequence(37, 4, "ring")
    require_sequence(37, 1, "ring")
    assert local_sequence(tokens, axis_of(4), "ulysses").shape == (2, 9)


def test_tokens_are_cut_along_the_sequence_in_the_order_of_the_positions():
    tokens = torch.arange(32).view(2, 16)
    part = local_sequence(tokens, axis_of(4, 1), "ring")
    assert part.tolist() == [[2, 3, 12, 13], [18, 19, 28, 29]]


@dataclass(slots=True)
class Packed:
    tokens: torch.Tensor
    position_ids: torch.Tensor


def test_a_batch_is_cut_by_its_tokens_wherever_they_are_and_positions_stay_whole():
    tokens, positions = torch.arange(16).view(2, 8), torch.arange(8).repeat(2, 1)
    image, features = torch.ones(2, 3, 4, 4), torch.ones(2, 4)
    part, axis = local_sequence(tokens, axis_of(2, 1), "ring"), axis_of(2, 1)
    named = {"image": image, "features": features, "position_ids": positions, "input_ids": tokens}
    for batch in (named, {"inner": (named, tokens)}, [features, Packed(tokens, positions)]):
        cut = local_sequences(batch, axis, "ring")
        before, after = tree_leaves(_plain(batch)), tree_leaves(_plain(cut))
        for old, new in zip(before, after, strict=True):
            assert torch.equal(new, part if old is tokens else old)


def _plain(batch):
    """The batch with dicts in place of dataclasses, which torch's trees do not open."""
    if isinstance(batch, Packed):
        return {"tokens": batch.tokens, "position_ids": batch.position_ids}
    return [_plain(each) for each in batch] if isinstance(batch, list) else batch


# -- attention ---------------------------------------------------------------------------------------


def operands(heads, kv_heads, seq, batch, dtype):
    """Query, key, value and the gradient of the output, with scores far from uniform."""
    generator = torch.Generator().manual_seed(heads * 100 + seq)
    shapes = [(batch, number, seq, 8) for number in (heads, kv_heads, kv_heads, heads)]
    return [(2 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def attend_to_parts(attention, cases, dtype):
    """Output and gradients of this rank's part, for each case."""
    axis = whole_axis()
    results = []
    for case in cases:
        parts = [local_sequence(tensor, axis, attention, dim=2) for tensor in operands(*case, dtype)]
        inputs = [tensor.requires_grad_() for tensor in parts[:3]]
        output = ATTENTIONS[attention](*inputs, axis)
        output.backward(parts[3])
        results.append([output.detach(), *(tensor.grad for tensor in inputs)])
    return results


def attend_to_all(case, rounded_to):
    """Output and gradients in fp64, by the definition: softmax(q k^T / sqrt(d)) v."""
    heads, kv_heads, seq, *_ = case
    *inputs, gradient = (tensor.double() for tensor in operands(*case, rounded_to))
    query, key, value = inputs = [tensor.requires_grad_() for tensor in inputs]
    key, value = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (key, value))
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    scores = (query @ key.mT / 8**0.5).masked_fill(hidden, -torch.inf)
    output = scores.softmax(-1) @ value
    output.backward(gradient)
    return [output.detach(), *(tensor.grad for tensor in inputs)]


def joined(parts, attention):
    """The whole sequence out of the ranks' parts along dim 2, in fp64."""
    size = len(parts)
    seq = size * parts[0].shape[2]
    order = torch.cat([POSITIONS[attention](seq, size, index) for index in range(size)])
    return torch.cat(parts, 2)[:, :, order.argsort()].double()


CASES = [(4, 4, 16, 1), (4, 2, 24, 3), (5, 1, 48, 2), (6, 2, 40, 1), (6, 6, 8, 1), (8, 4, 160, 1)]
"""Heads, kv heads, positions, batch."""


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_attention_over_ranks_is_attention_to_the_whole_sequence(ranks, attention, size):
    by_rank = ranks.run(attend_to_parts, size, attention, CASES, torch.float32)
    for case, *results in zip(CASES, *by_rank, strict=True):
        for parts, expected in zip(
            zip(*results, strict=True), attend_to_all(case, torch.float32), strict=True
        ):
            # fp32 against fp64: sums of up to 160 terms, each rounded to 6e-8
            torch.testing.assert_close(joined(parts, attention), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_attention_over_three_ranks_is_exact_in_fp64(ranks, attention):
    case = (4, 2, 36, 2)
    by_rank = ranks.run(attend_to_parts, 3, attention, [case], torch.float64)
    for parts, expected in zip(
        zip(*(result for (result,) in by_rank), strict=True),
        attend_to_all(case, torch.float64),
        strict=True,
    ):
        # nothing on the way is rounded to fp32
        torch.testing.assert_close(joined(parts, attention), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_bf16_over_ranks_is_as_near_to_fp64_as_on_one_device(ranks, attention):
    case = (6, 2, 64, 2)
    expected = attend_to_all(case, torch.bfloat16)
    alone = ranks.run(attend_to_parts, 1, attention, [case], torch.bfloat16)
    spread = ranks.run(attend_to_parts, 4, attention, [case], torch.bfloat16)
    for index, name in enumerate(("output", "query", "key", "value")):
        errors = [
            (joined([result[0][index] for result in results], attention) - expected[index]).norm()
            for results in (alone, spread)
        ]
        # Each block's result is rounded once more before it is joined: at most twice the error.
        assert errors[1] < 2 * errors[0], name


def test_ulysses_refuses_more_ranks_than_heads():
    query, key, value, _ = operands(3, 3, 8, 1, torch.float32)
    with pytest.raises(PlanError, match=r"3 query heads(.|\n)*use context=ring"):
        ulysses_attention(query, key, value, axis_of(4))


# -- models ------------------------------------------------------------------------------------------


def batch():
    tokens = torch.randint(SMALL.vocab_size, (3, SMALL.seq + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def model():
    built = Transformer(SMALL)
    built.initialize(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)  # so that attention is far from uniform
    return built


def loss_and_gradients(attention, recompute):
    """As one step of training has them, with the elements that forward kept for backward."""
    axis, built = whole_axis(), model()
    context_parallel(built, axis, attention)
    compile_blocks(list(built.blocks), recompute)
    tokens, targets = (local_sequence(tensor, axis, attention) for tensor in batch())
    parameters = {parameter.data_ptr() for parameter in built.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(built(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    averages = [loss.detach(), *(parameter.grad for parameter in built.parameters())]
    for average in averages:
        axis.all_reduce(average, "average").wait()
        average /= axis.size
    return averages, sum(kept.values())


@pytest.fixture(scope="module")
def alone():
    return loss_and_gradients("ring", "none")


@pytest.mark.parametrize(
    ("attention", "size", "recompute"),
    [
        ("ring", 2, "none"),
        ("ring", 4, "none"),
        ("ring", 2, "selective"),
        ("ring", 2, "full"),
        ("ulysses", 2, "none"),
        ("ulysses", 4, "none"),
        ("ulysses", 2, "selective"),
        ("ulysses", 2, "full"),
    ],
)
def test_a_model_over_ranks_has_the_loss_and_gradients_of_one_device(
    ranks, alone, attention, size, recompute
):
    for averages, _ in ranks.run(loss_and_gradients, size, attention, recompute):
        for value, expected in zip(averages, alone[0], strict=True):
            # fp32 sums in another order, through two layers
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
def test_what_a_rank_keeps_for_backward_falls_with_the_ranks(ranks, alone, attention, size):
    for _, kept in ranks.run(loss_and_gradients, size, attention, "none"):
        # Ulysses with fewer key heads than ranks keeps some of them twice.
        assert kept < 1.15 * alone[1] / size


def largest_tensor(attention, seq):
    """The largest that forward and backward make, in elements of this rank's query."""
    axis, largest = whole_axis(), 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return made

    parts = [
        local_sequence(tensor, axis, attention, dim=2) for tensor in operands(4, 4, seq, 1, torch.float32)
    ]
    inputs = [tensor.requires_grad_() for tensor in parts[:3]]
    with Largest():
        ATTENTIONS[attention](*inputs, axis).backward(parts[3])
    return largest / parts[0].numel()


@pytest.mark.parametrize(("attention", "times"), [("ring", 2), ("ulysses", 3)])
def test_no_rank_makes_a_tensor_of_the_whole_sequence_or_of_all_scores(ranks, attention, times):
    # Key and value are one tensor in the ring; query, key and value are one in Ulysses.
    assert max(ranks.run(largest_tensor, 4, attention, 512)) <= times


def test_a_model_without_the_attention_is_refused():
    other = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ModelError, match="Sequential has no attention that works across ranks"):
        context_parallel(other, axis_of(2), "ring")
    context_parallel(other, axis_of(1), "ring")


def test_a_model_can_be_copied_and_pickled_and_counts_positions_from_zero():
    built = model()
    tokens, _ = batch()
    expected = built(tokens)
    assert torch.equal(copy.deepcopy(built)(tokens), expected)
    assert torch.equal(pickle.loads(pickle.dumps(built))(tokens), expected)
