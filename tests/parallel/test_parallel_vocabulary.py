"""A vocabulary that is split over ranks, against torch's embedding and cross-entropy on one device."""

import math
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shoal.models.loss import IGNORED
from shoal.parallel import Axis
from shoal.parallel.tensor import vocabulary as vocabulary_module
from shoal.parallel.tensor.vocabulary import embed_rows, vocabulary_cross_entropy
from shoal.record import NullRecorder

VOCABULARY, SEQ, WIDTH = 37, 8, 6


def axis():
    if not dist.is_initialized():
        return Axis("tp", (0,), 0, None, NullRecorder())
    return Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), None, NullRecorder())


def own_rows(tp):
    """First and number of this rank's rows: 19 and 18, or 10, 10, 10 and 7."""
    height = -(-VOCABULARY // tp.size)
    first = tp.index * height
    return first, min(height, VOCABULARY - first)


def tokens(batch, seed=0):
    return torch.randint(VOCABULARY, (batch, SEQ), generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def look_ups(batch, sequence):
    tp = axis()
    weight, seed = normal(VOCABULARY, WIDTH, seed=0), normal(batch, SEQ, WIDTH, seed=1)
    first, rows = own_rows(tp)
    plain = weight.clone().requires_grad_()
    expected = F.embedding(tokens(batch), plain)
    expected.backward(seed)
    own = weight[first : first + rows].clone().requires_grad_()
    result = embed_rows(tokens(batch), own, tp, first, sequence=sequence)
    parts = tp.size if sequence else 1
    index = tp.index if sequence else 0
    result.backward(seed.chunk(parts, 1)[index])
    wanted = plain.grad[first : first + rows]
    return result.detach(), expected.detach().chunk(parts, 1)[index], own.grad, wanted


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_split_embedding_is_that_of_one_device(ranks, size, sequence, batch):
    for result, expected, gradient, wanted in ranks.run(look_ups, size, batch, sequence):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)  # zeros are all that is added
        torch.testing.assert_close(gradient, wanted)


def losses(batch, dtype, padding, overwrite, chunk):
    """Losses and gradients beside one device's, computed in fp32 from the same logits."""
    tp = axis()
    logits = (8 * normal(batch, SEQ, VOCABULARY, seed=0)).to(dtype)
    targets, seed = tokens(batch, seed=1), normal(batch, SEQ, seed=2)
    targets[0, 2] = IGNORED
    plain = logits.float().clone().requires_grad_()
    expected = F.cross_entropy(plain.flatten(0, 1), targets.flatten(), reduction="none").view(batch, SEQ)
    expected.backward(seed)
    first, rows = own_rows(tp)
    own = F.pad(logits[..., first : first + rows], (0, padding), value=1e4).requires_grad_()
    given = own * 1  # what is written over is not a leaf
    with patch.object(vocabulary_module, "_CHUNK_ELEMENTS", chunk):
        result = vocabulary_cross_entropy(
            given, targets, tp, first, rows=rows if padding else None, overwrite=overwrite
        )
        result.backward(seed)
    wanted = F.pad(plain.grad[..., first : first + rows], (0, padding))
    return result.detach(), expected.detach(), own.grad.float(), wanted


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("batch", "overwrite", "chunk"), [(1, False, 1 << 20), (3, True, 60)])
def test_a_split_loss_is_that_of_one_device(ranks, size, padding, batch, overwrite, chunk):
    for result, expected, gradient, wanted in ranks.run(
        losses, size, batch, torch.float32, padding, overwrite, chunk
    ):
        # fp32 sums in another order, of losses up to 50
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_split_loss_of_bf16_logits_is_computed_in_fp32(ranks, overwrite):
    for result, expected, gradient, wanted in ranks.run(losses, 2, 3, torch.bfloat16, 3, overwrite, 60):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-5)
        # Only the gradient is rounded, to 8 bits.
        torch.testing.assert_close(gradient, wanted, rtol=2**-8, atol=1e-6)


def extreme(value):
    tp = axis()
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 1] = value if tp.index == 0 else -value
    targets = torch.tensor([[1, 4]])
    return vocabulary_cross_entropy(logits, targets, tp, 3 * tp.index)


def test_a_loss_of_large_logits_does_not_overflow(ranks):
    for found in ranks.run(extreme, 2, 1e4):
        torch.testing.assert_close(found, torch.tensor([[0.0, math.log(6)]]))


def twice(overwrite):
    tp = axis()
    logits = normal(1, SEQ, 4, seed=tp.index).requires_grad_()
    loss = vocabulary_cross_entropy(logits * 1, tokens(1) % 8, tp, 4 * tp.index, overwrite=overwrite).sum()
    loss.backward(retain_graph=True)
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation") if overwrite else nullcontext()
    ):
        loss.backward()


def test_logits_that_were_written_over_cannot_be_used_again(ranks):
    ranks.run(twice, 2, False)
    ranks.run(twice, 2, True)
