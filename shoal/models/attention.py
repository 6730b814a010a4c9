"""Causal attention on one device, by a kernel of torch that never has all scores in memory.

torch's own operator falls back to plain products, whose memory grows with the square of the sequence, where
no kernel takes its arguments. On GPUs none takes fp32 with keys that several queries share (grouped-query
attention), and often none takes a mask with them. Keys and values are repeated for every query head there,
which a kernel does take.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the type in which autocast lets products with a tensor be computed; None if it is off."""
    kind = tensor.device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products with a tensor are computed in its own type."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


@torch.compiler.assume_constant_result  # torch 2.11 could not trace it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


_SHORT = 16  # tokens; shorter documents on average are masked


class Documents:
    """The document of each token of some packed samples.

    Like `Angles` it is neither a tuple nor a dataclass, so that what casts the inputs of blocks leaves it as
    it is. A kernel for sequences of variable length would take their lengths from `starts`.

    Args:
        position_ids: Position of each token in its document, `[batch, seq]`, int64; `seq` is the whole sample
            even if the tokens are a part of it.

    Attributes:
        starts: Position in the sample at which each token's document begins, `[batch, seq]`, int64.
    """

    def __init__(self, position_ids: Tensor) -> None:
        self.starts = torch.arange(position_ids.shape[1], device=position_ids.device) - position_ids
        self._mask: Tensor | None = None
        self._lengths: list[int] | None = None

    def lengths(self) -> list[int] | None:
        """Return the length of each document, sample after sample; None if attention to each costs more.

        Attention to one document after another leaves out all products between documents, and costs a call
        for each. On one core of a CPU it took 0.05 to 0.5 of the time of the mask for documents of 32 tokens
        on average, up to 1.2 for 16, and more for shorter ones, in samples of 128 to 2048 tokens. GPUs would
        wait for the lengths, and a compiled graph cannot depend on them.
        """
        starts = self.starts
        if type(starts) is not Tensor or starts.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        if self._lengths is None:
            begins = torch.ones_like(starts, dtype=torch.bool)
            begins[:, 1:] = starts[:, 1:] != starts[:, :-1]
            places = begins.flatten().nonzero().flatten().tolist()
            self._lengths = [end - begin for begin, end in pairwise([*places, starts.numel()])]
        return self._lengths if starts.numel() >= _SHORT * len(self._lengths) else None

    def mask(self) -> Tensor:
        """Return which positions see which, `[batch, 1, seq, seq]`, bool; made once."""
        if self._mask is None:
            every = torch.arange(self.starts.shape[1], device=self.starts.device)
            self._mask = sees(self.starts, every, every)
        return self._mask


def sees(starts: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which queries see which keys: those of their own document that are not later.

    Args:
        starts: Position at which each token's document begins, `[batch, seq]`.
        queries: Positions in the sample, `[queries]`, int64.
        keys: Positions in the sample, `[keys]`, int64.

    Returns:
        `[batch, 1, queries, keys]`, bool.
    """
    are_together = starts[:, queries, None] == starts[:, None, keys]
    return (are_together & (queries[:, None] >= keys))[:, None]


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
