"""Attention within documents: one after another, or by a mask, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shoal.models import Documents
from shoal.models.attention import causal_attention

SEQ = 96


def positions_of(*samples):
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in samples])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_to_each_document_is_attention_by_the_mask_with_its_gradients(kv_heads):
    documents = Documents(positions_of([96], [1, 40, 55], [31, 65]))
    assert documents.lengths() == [96, 1, 40, 55, 31, 65]
    torch.manual_seed(0)
    given = [
        torch.randn(3, heads, SEQ, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    weight = torch.randn(3, 4, SEQ, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*given, attn_mask=documents.mask(), enable_gqa=True)
    found = causal_attention(*given, documents)
    torch.testing.assert_close(found, expected)
    for one, two in zip(
        torch.autograd.grad((found * weight).sum(), given),
        torch.autograd.grad((expected * weight).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def test_short_documents_and_other_devices_are_masked():
    assert Documents(positions_of([8] * 12)).lengths() is None
    assert Documents(positions_of([96]).to("meta")).lengths() is None
