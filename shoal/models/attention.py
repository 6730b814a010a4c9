"""Causal attention on one device, by a kernel of torch that never has all scores in memory.

torch's own operator falls back to plain products, whose memory grows with the square of the sequence, where
no kernel takes its arguments. On GPUs none takes fp32 with keys that several queries share (grouped-query
attention), and often none takes a mask with them. Keys and values are repeated for every query head there,
which a kernel does take.
"""

from __future__ import annotations

import operator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from shoal.models.autocast import autocast_dtype
from shoal.models.documents import Documents

_LENGTH = 128  # tokens of the attention of which torch is asked; the length hardly matters for the answer


def causal_attention(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None = None) -> Tensor:
    """Compute attention in which each position sees itself and earlier ones, by torch's fastest kernel.

    Args:
        query: `[batch, heads, seq, head_dim]`.
        key: `[batch, kv_heads, seq, head_dim]`, where `kv_heads` divides `heads`.
        value: `[batch, kv_heads, seq, head_dim]`.
        documents: Documents that attention does not leave; None if a sample is one.

    Returns:
        `[batch, heads, seq, head_dim]`.
    """
    if documents is not None and (lengths := documents.lengths()) is not None:
        return _one_by_one(query, key, value, lengths)
    return _attend(query, key, value, None if documents is None else documents.mask())


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Compute causal attention within each document; the samples' documents follow each other."""
    # One split of all samples: its backward is one concatenation, and that of a slice is a tensor of zeros.
    queries, keys, values = (
        each.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(lengths, 2) for each in (query, key, value)
    )
    mixed = [_attend(*each, None) for each in zip(queries, keys, values, strict=True)]
    output: Tensor = torch.cat(mixed, 2)[0].unflatten(1, (query.shape[0], query.shape[2])).transpose(0, 1)
    return output


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention by a mask, or causal attention without one."""
    # A compiled graph may have sizes of any value, and the answer is for these ones.
    heads, kv_heads, head_dim = map(operator.index, (query.shape[1], key.shape[1], query.shape[3]))
    dtype = autocast_dtype(query) or query.dtype
    shares = heads != kv_heads
    if shares and not _kernel_shares_keys(query.device, dtype, heads, kv_heads, head_dim, mask is not None):
        key, value = (_repeat(each, heads // kv_heads) for each in (key, value))
        shares = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=shares
    )


@torch.compiler.assume_constant_result  # a compiled graph has the answer
def _kernel_shares_keys(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, is_masked: bool
) -> bool:
    """Return whether queries can share keys without all scores in memory."""
    if device.type != "cuda":  # kernels for CPUs do; other devices only stand in for one, as meta does
        return True
    chosen = _chosen(device, dtype, heads, kv_heads, head_dim, is_masked, _switches())
    return chosen != SDPBackend.MATH


def _switches() -> tuple[bool, ...]:
    """Return what can be switched for the whole process and changes torch's choice of a kernel.

    Where determinism is switched, torch compiles a graph again. Where kernels are, it runs those that it has:
    results stay right, and a graph may need the memory of all scores.
    """
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


@lru_cache(maxsize=64)
def _chosen(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    is_masked: bool,
    switches: tuple[bool, ...],
) -> SDPBackend:
    """Ask torch which kernel it would run, with a backward; an answer holds for these `_switches` alone."""
    query, key, value = (
        torch.empty(1, count, _LENGTH, head_dim, dtype=dtype, device=device, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    mask = torch.empty(1, 1, _LENGTH, _LENGTH, dtype=torch.bool, device=device) if is_masked else None
    return SDPBackend(
        torch._fused_sdp_choice(query, key, value, mask, 0.0, not is_masked, enable_gqa=heads != kv_heads)
    )


def _repeat(tensor: Tensor, times: int) -> Tensor:
    """Return `[batch, kv_heads, seq, head_dim]` with each head so many times in a row."""
    return tensor.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
