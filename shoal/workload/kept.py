"""The tensors that a transformer's forward keeps for backward, operator by operator.

The counts follow Korthikanti et al. (arXiv:2205.05198, section 4) and torch's kernels. With n tokens of a
sample, H hidden, A heads and K key-value heads of width D, F the feed-forward width, the elements are:

    norm          LayerNorm: input n H, mean and deviation 2 n. RMSNorm: input n H and root n if fused, and if
                  not, in fp32 input n H, quotient n H and root n. Both: output n H, for products after it
    attention     query n A D, key and value n K D each, output n A D; log-sum-exp n A if fused, and if not
                  probabilities n n A, and with dropout as many again and their mask
    feed-forward  gated: gate, silu(gate), up, and the product of the last two, n F each; else up and gelu(up)
    dropout       a mask of one byte for each of n H

With k experts for each token, out of E, the feed-forward layer keeps its tensors for k n rows, and

    each choice   H read, H written, H in its token's order; its token, and its place in that order, 8 bytes
                  each; its weight
    each token    in fp32 E logits and E probabilities, the logits' log-sum-exp
    router        in fp32 its input, n H, in place of the norm's output; in bf16 a copy of its weight, E H
    each sample   E, the share that each expert gets

Under recompute=selective the results of products and of attention stay. Those of the last product of
attention and of the feed-forward layer stay too, although no backward reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.workload.model_shape import ModelShape
from shoal.workload.operation import Keep, Part, Saved

_FP32 = 4
_INT64 = 8


def kept_by_layer(shape: ModelShape, *, compiled: bool = False) -> Iterator[Saved]:
    """Yield the tensors that a layer keeps for backward.

    Args:
        shape: Shape of the model.
        compiled: Whether torch.compile makes the layer's kernels. They compute silu(gate) again in backward.
    """
    stream = float(shape.seq * shape.hidden)
    yield Saved("input", stream, Part.STREAM, Keep.ALWAYS if shape.one_kernel_norm else Keep.START)
    yield from kept_by_norm(shape)
    yield Saved("norm", stream, Part.STREAM)
    yield from _attention(shape)
    yield Saved("attention's sum", stream, Part.ROWS, Keep.SELECTIVE)
    if shape.one_kernel_norm:
        yield Saved("stream", stream, Part.STREAM)
    yield from kept_by_norm(shape)
    if not shape.experts or shape.shared_experts:
        yield Saved("norm", stream, Part.STREAM)
    if shape.experts:
        yield from _experts(shape, compiled)
    else:
        yield from _feed_forward(shape, shape.seq, shape.ffn, Part.COLUMNS, compiled)
        yield Saved("feed-forward's sum", stream, Part.ROWS, Keep.SELECTIVE)
    if shape.dropout:
        yield Saved("masks", 2 * stream, Part.STREAM, width=1)


def kept_by_norm(shape: ModelShape, keep: Keep = Keep.REST) -> Iterator[Saved]:
    """Yield the tensors that a norm keeps, besides its output, and its input if that stays unchanged."""
    tokens, stream = float(shape.seq), float(shape.seq * shape.hidden)
    if shape.biases:
        yield Saved("mean and deviation", 2 * tokens, Part.STREAM, keep, _FP32)
    else:
        if not shape.one_kernel_norm:
            yield Saved("input and quotient", 2 * stream, Part.STREAM, keep, _FP32)
        yield Saved("root", tokens, Part.STREAM, keep, _FP32)


def _attention(shape: ModelShape) -> Iterator[Saved]:
    tokens, heads, width = float(shape.seq), shape.heads, shape.width
    latent = shape.latent
    if latent is None:
        yield Saved(
            "queries, keys, values", tokens * (heads + 2 * shape.keys) * width, Part.COLUMNS, Keep.RESULTS
        )
    else:
        narrow = tokens * (latent.query + latent.keys)
        yield Saved("narrow", narrow + tokens * latent.rotary, Part.WHOLE, Keep.RESULTS)
        yield Saved("norms of narrow", narrow, Part.WHOLE)
        wide = tokens * heads * (width + latent.rotary)
        yield Saved("queries", wide, Part.COLUMNS, Keep.RESULTS)
        yield Saved("keys", wide, Part.COLUMNS)
        yield Saved("values", tokens * heads * width, Part.COLUMNS, Keep.RESULTS)
    if shape.fused_attention:
        yield Saved("log-sum-exp", tokens * heads, Part.COLUMNS, Keep.RESULTS, _FP32)
    else:
        scores = tokens * tokens * heads
        yield Saved("probabilities", scores, Part.COLUMNS)
        if shape.dropout:
            yield Saved("dropped probabilities", scores, Part.COLUMNS)
            yield Saved("mask of probabilities", scores, Part.COLUMNS, width=1)
    yield Saved("attention's result", tokens * heads * width, Part.COLUMNS, Keep.RESULTS)


def _feed_forward(shape: ModelShape, rows: int, width: int, part: Part, compiled: bool) -> Iterator[Saved]:
    inner = float(rows * width)
    gates = 2 if shape.gated else 1
    yield Saved("gate, up" if shape.gated else "up", gates * inner, part, Keep.RESULTS)
    yield Saved("activation", inner if compiled else gates * inner, part)


def _experts(shape: ModelShape, compiled: bool) -> Iterator[Saved]:
    tokens, choices, experts = float(shape.seq), float(shape.choices), shape.experts
    stream = tokens * shape.hidden
    both = bool(shape.shared_experts)  # both read the norm's output unchanged
    yield Saved("router's input", stream, Part.STREAM, Keep.REST, _FP32, copied=both)
    weight = float(experts * shape.hidden)
    yield Saved("router's weight", weight, Part.POSITIONS, Keep.REST, _FP32, copied=True)
    yield Saved("logits", tokens * experts, Part.STREAM, Keep.RESULTS, _FP32)
    yield Saved("probabilities", tokens * experts + tokens + experts, Part.STREAM, Keep.REST, _FP32)
    chosen = tokens * shape.experts_per_token
    if shape.renormalize:
        yield Saved("weights before", chosen + tokens, Part.STREAM, Keep.REST, _FP32)
    yield Saved("weights", chosen, Part.STREAM)
    yield Saved("order", chosen + choices, Part.STREAM, Keep.REST, _INT64)
    rows = choices * shape.hidden
    yield Saved("experts' input", rows, Part.STREAM)
    yield from _feed_forward(shape, shape.choices, shape.expert_width, Part.STREAM, compiled)
    yield Saved("experts' results", rows, Part.STREAM, Keep.RESULTS)
    yield Saved("results in order", chosen * shape.hidden, Part.STREAM)
    if shape.shared_experts:
        width = shape.shared_experts * shape.expert_width
        yield from _feed_forward(shape, shape.seq, width, Part.COLUMNS, compiled)
        yield Saved("shared experts' sum", stream, Part.ROWS, Keep.SELECTIVE)
