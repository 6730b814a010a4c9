"""The Workload of a transformer, computed from its shape.

With n tokens of a sample, H hidden, A heads of width D, K key-value heads, F the feed-forward width, a
layer's operations are:

    products    query n H (A D), key and value n H (K D) each, output n (A D) H; up n H F, gate n H F if
                gated, down n F H; with E experts, of which each token goes to k: the router n H E, and up,
                gate, down with k n rows over E weights; shared experts count as a dense layer
    attention   n, A, K, D
    passes      norms, rotary embedding, residual sums, the feed-forward's activation, and dropout if any

`shoal.spec.workload.transformer` has the bytes of passes.

Passes over memory: the bytes of norms, activations, rotary embedding, sums and the loss.

Bytes are for an element of 16 bits: two for each time that it is read or written. One kernel does a pass if
`fused_passes` is True. If not, torch runs one operator after another, each of which reads and writes memory:
RMSNorm's forward on cores squares, takes the mean, multiplies by the root and by the weight; the rotary
embedding and the loss compute in fp32, and cast to it and back. A test counts the bytes of all operators that
run.

The tensors that a transformer's forward keeps for backward, operator by operator.

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

The first and the last piece of a transformer: the embedding of its inputs, and its head and loss.

Tokens are looked up, patches of an image are multiplied. The end is a norm, the head's product and the loss.
BERT's layers end in a norm; its end is a product and a norm before the head, and a product for the sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shoal.spec.workload.model_shape import Latent, ModelShape
from shoal.spec.workload.workload import (
    Attention,
    Block,
    Keep,
    Operation,
    Parameters,
    Part,
    Pass,
    Product,
    Saved,
    Workload,
)


def norm_pass(shape: ModelShape, elements: float, part: Part = Part.STREAM) -> Pass:
    """Return the pass of a norm over the last dim; LayerNorm is one kernel everywhere."""
    if shape.one_kernel_norm:
        return Pass("norm", elements, 4, 8, part, backward_kernels=2)
    return Pass("norm", elements, 14, 48, part, kernels=10)


def rotary_pass(shape: ModelShape, elements: float) -> Pass:
    """Return the pass that rotates queries and keys; unfused: a roll, a product, a sum with one, a cast."""
    if shape.fused_passes:
        return Pass("rotary", elements, 4, 4, Part.COLUMNS, kernels=2)
    return Pass("rotary", elements, 26, 44, Part.COLUMNS, kernels=8, backward_kernels=14, in_fp32=(28, 36))


def activation_pass(shape: ModelShape, elements: float, part: Part) -> Pass:
    """Return the pass between the feed-forward layer's products."""
    if not shape.gated:
        return Pass("gelu", elements, 4, 6, part)
    if shape.fused_passes:
        return Pass("silu and product", elements, 6, 10, part)
    return Pass("silu and product", elements, 10, 18, part, kernels=2, backward_kernels=3)


def sum_pass(shape: ModelShape, elements: float) -> Pass:
    """Return the pass that adds a branch to the stream; backward adds its gradient to the stream's."""
    if shape.dropout:
        return Pass("dropout and sum", elements, 7, 5, Part.STREAM)
    return Pass("sum", elements, 6, 2 if shape.fused_passes else 6, Part.STREAM)


def joined_gradients(shape: ModelShape, elements: float, products: int) -> Iterator[Pass]:
    """Yield passes that add gradients of products with a common input; with fused kernels these are one."""
    if not shape.fused_passes and products > 1:
        sums = products - 1
        yield Pass("gradients' sum", elements, 0, 6 * sums, Part.WHOLE, kernels=0, backward_kernels=sums)


def dispatch_passes(shape: ModelShape, rows: int) -> Iterator[Pass]:
    """Yield passes that sort rows by expert and add results up; unfused, also join the experts' results."""
    routed, inside = float(rows * shape.hidden), float(rows * shape.expert_width)
    if shape.fused_passes:
        yield Pass("dispatch", routed, 8, 8, Part.STREAM, kernels=4)
        return
    yield Pass("dispatch", routed, 26, 34, Part.STREAM, kernels=30)
    yield Pass("experts' runs", inside, 8 if shape.gated else 4, 6, Part.STREAM, kernels=4)


def loss_pass(shape: ModelShape, logits: float) -> Pass:
    """Return the pass of cross-entropy; logits computed in 16 bits are copied to fp32."""
    if shape.fused_passes:
        return Pass("loss", logits, 14, 10, Part.COLUMNS, kernels=4)
    return Pass("loss", logits, 18, 26, Part.COLUMNS, kernels=4, in_fp32=(12, 20))


def compiled_loss(loss: Pass) -> Pass:
    """Return the pass of cross-entropy that torch.compile makes: it reads logits as the head made them."""
    return replace(loss, forward=4, backward=4, kernels=2, backward_kernels=1)


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
    yield from _kept_by_attention(shape)
    yield Saved("attention's sum", stream, Part.ROWS, Keep.SELECTIVE)
    if shape.one_kernel_norm:
        yield Saved("stream", stream, Part.STREAM)
    yield from kept_by_norm(shape)
    if not shape.experts or shape.shared_experts:
        yield Saved("norm", stream, Part.STREAM)
    if shape.experts:
        yield from _kept_by_experts(shape, compiled)
    else:
        yield from _kept_by_feed_forward(shape, shape.seq, shape.ffn, Part.COLUMNS, compiled)
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


def _kept_by_attention(shape: ModelShape) -> Iterator[Saved]:
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


def _kept_by_feed_forward(
    shape: ModelShape, rows: int, width: int, part: Part, compiled: bool
) -> Iterator[Saved]:
    inner = float(rows * width)
    gates = 2 if shape.gated else 1
    yield Saved("gate, up" if shape.gated else "up", gates * inner, part, Keep.RESULTS)
    yield Saved("activation", inner if compiled else gates * inner, part)


def _kept_by_experts(shape: ModelShape, compiled: bool) -> Iterator[Saved]:
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
    yield from _kept_by_feed_forward(shape, shape.choices, shape.expert_width, Part.STREAM, compiled)
    yield Saved("experts' results", rows, Part.STREAM, Keep.RESULTS)
    yield Saved("results in order", chosen * shape.hidden, Part.STREAM)
    if shape.shared_experts:
        width = shape.shared_experts * shape.expert_width
        yield from _kept_by_feed_forward(shape, shape.seq, width, Part.COLUMNS, compiled)
        yield Saved("shared experts' sum", stream, Part.ROWS, Keep.SELECTIVE)


_OF_ANGLES = 12  # operators that make the angles: positions, powers, their product, cosine, sine, joins
_SENTENCES = 2  # kinds of tokens, and answers to whether two sentences follow


def embedding_of(shape: ModelShape) -> Block:
    """Return piece 0: the embedding."""
    hidden = shape.hidden
    stream = float(shape.seq * hidden)
    positions = 0 if shape.rotary else shape.seq * hidden
    kernels = (1 if shape.fused_passes else 1 + _OF_ANGLES) if shape.rotary else 2
    operations: list[Operation] = []
    saved: list[Saved] = []
    if shape.patch:
        operations.append(Product("patches", shape.seq - 1, shape.patch, hidden, Part.COLUMNS))
        operations.append(Pass("positions", stream, 6, 2, Part.STREAM, kernels=kernels))
        parameters = Parameters(whole=positions + hidden, divided=(shape.patch + 1) * hidden)
        tables = positions
    else:
        backward = None if shape.fused_passes else 1
        operations.append(
            Pass("embedding", stream, 4, 8, Part.STREAM, kernels=kernels, backward_kernels=backward)
        )
        parameters = Parameters(whole=positions, divided=shape.vocab * hidden)
        tables = shape.vocab * hidden + positions
    if shape.objective == "masked":
        operations.append(Pass("norm", stream, 4, 8, Part.STREAM))
        saved += [Saved("sum", stream, Part.STREAM, Keep.ALWAYS), *_norm(shape)]
        parameters = Parameters(parameters.whole + (_SENTENCES + 2) * hidden, parameters.divided)
        tables += _SENTENCES * hidden
    if shape.dropout and not shape.rotary:
        operations.append(Pass("dropout", stream, 5, 5, Part.STREAM))
        saved.append(Saved("mask", stream, Part.STREAM, Keep.ALWAYS, 1))
    if shape.rotary and shape.is_own:
        angles = 2.0 * shape.seq * shape.width  # cosine and sine, for all samples and all layers
        saved.append(Saved("angles", angles, Part.POSITIONS, Keep.ALWAYS, _FP32))
    return Block("embedding", tuple(operations), parameters, tuple(saved), joins=1, tables=tables)


def end_of(shape: ModelShape) -> Block:
    """Return the last piece: the end."""
    rows, hidden = shape.tokens_of_loss, shape.hidden
    stream, logits = float(shape.seq * hidden), float(rows * shape.vocab)
    norm = hidden * (2 if shape.biases else 1)
    table = 0 if shape.tied else shape.vocab * hidden
    before: tuple[Operation, ...] = (norm_pass(shape, stream),)
    whole = norm
    if shape.objective == "masked":
        before = (
            Product("pooler", 1, hidden, hidden),
            Product("sentences", 1, hidden, _SENTENCES),
            Product("transform", rows, hidden, hidden),
            Pass("gelu and norm", float(rows * hidden), 8, 14, Part.STREAM, kernels=2),
        )
        whole += 2 * (hidden + 1) * hidden + _SENTENCES * (hidden + 1)
    bias = shape.vocab if shape.objective != "next-token" else 0
    saved = [
        *([Saved("input", stream, Part.STREAM, Keep.ALWAYS)] if shape.one_kernel_norm else []),
        *_norm(shape),
        Saved("logits", logits, Part.COLUMNS, Keep.ALWAYS, _FP32),
    ]
    return Block(
        "end",
        (
            *before,
            Product("head", rows, hidden, shape.vocab, Part.COLUMNS),
            loss_pass(shape, logits),
        ),
        Parameters(whole=whole, divided=table + bias),
        tuple(saved),
        joins=1,
    )


def _norm(shape: ModelShape) -> tuple[Saved, ...]:
    output = Saved("norm", float(shape.seq * shape.hidden), Part.STREAM, Keep.ALWAYS)
    return (*kept_by_norm(shape, Keep.ALWAYS), output)


def compilable_workload_of(shape: ModelShape) -> Workload:
    """Return the workload of a transformer whose kernels torch makes, compiled or one by one, on a GPU.

    `workload_of` returns that of a program with fused kernels of its own, such as Megatron-LM. Layers and
    loss are compiled, but no embedding and no experts, whose numbers of rows change.
    """
    eager = workload_of(shape.replace(fused_passes=False, fused_norm=True))
    fused = workload_of(shape)
    layers: dict[Block, Block] = {}
    for block, other in zip(fused.layers, eager.layers, strict=True):
        if block not in layers:
            is_dense = not block.routed
            of_layer = shape.replace(experts=0, shared_experts=0) if is_dense else shape
            saved = tuple(kept_by_layer(of_layer, compiled=is_dense))
            layers[block] = _compilable(replace(block, saved=saved), other, 1 if is_dense else 2)
    narrow = tuple(replace(each, width=None) if each.name == "logits" else each for each in fused.end.saved)
    *before, loss = fused.end.operations
    assert isinstance(loss, Pass)
    end = replace(fused.end, operations=(*before, compiled_loss(loss)), saved=narrow)
    return replace(
        fused,
        embedding=_compilable(eager.embedding, eager.embedding, 0),
        layers=tuple(layers[block] for block in fused.layers),
        end=_compilable(end, eager.end, 1),
        synchronises=False,
    )


def _compilable(block: Block, eager: Block, graphs: int) -> Block:
    """Return a compiled block with its eager one, and with the products and experts of that."""
    products = {each.name: each for each in eager.operations if isinstance(each, Product)}
    operations = [products.get(each.name, each) for each in block.operations]
    if block.routed:
        router = products["router"]
        last = operations[-1:]  # the sum
        operations = operations[: operations.index(router)]
        operations += [*eager.operations[eager.operations.index(router) : -1], *last]
    weights = sum(each.matrices * each.copies for each in products.values())
    norms = sum(each.name == "norm" for each in eager.operations)
    sums = weights + norms + (1 if block.tables else 0)
    one_by_one = replace(eager, sums=sums)
    return replace(block, operations=tuple(operations), sums=sums, graphs=graphs, eager=one_by_one)


def workload_of(shape: ModelShape) -> Workload:
    """Return the workload of a transformer of this shape."""
    layer = _layer(shape)
    dense = _layer(shape.replace(experts=0, shared_experts=0)) if shape.dense_layers else layer
    return Workload(
        name=shape.name,
        length=shape.seq,
        hidden=shape.hidden,
        embedding=embedding_of(shape),
        layers=(dense,) * shape.dense_layers + (layer,) * (shape.layers - shape.dense_layers),
        end=end_of(shape),
        tied=shape.tied,
        heads=shape.heads,
        kv_heads=shape.keys,
        experts=shape.experts,
    )


def _layer(shape: ModelShape) -> Block:
    operations = tuple(_operations(shape))
    products = [each for each in operations if isinstance(each, Product)]
    divided = [each for each in products if each.is_divided]
    whole = [each for each in products if each not in divided and each.copies == 1]
    norms = 2 * shape.hidden * (2 if shape.biases else 1)
    if shape.latent:
        norms += shape.latent.query + shape.latent.keys
    biases = {
        part: sum(each.outputs for each in divided if each.part is part) if shape.biases else 0
        for part in (Part.COLUMNS, Part.ROWS)
    }
    return Block(
        "layer",
        operations,
        Parameters(
            whole=norms + sum(each.inputs * each.outputs for each in whole) + biases[Part.ROWS],
            divided=sum(each.inputs * each.outputs for each in divided) + biases[Part.COLUMNS],
            experts=sum(each.copies * each.inputs * each.outputs for each in products if each.copies > 1),
        ),
        tuple(kept_by_layer(shape)),
        routed=shape.choices * shape.hidden if shape.experts else 0,
        joins=sum(each.part is Part.ROWS for each in divided),
    )


def _operations(shape: ModelShape) -> Iterator[Operation]:
    stream = float(shape.seq * shape.hidden)
    norm = norm_pass(shape, stream)
    yield norm
    yield from _attention(shape) if shape.latent is None else _latent_attention(shape, shape.latent)
    yield sum_pass(shape, stream)
    yield norm
    if shape.experts:
        yield from _experts(shape)
    else:
        yield from _feed_forward(shape, shape.ffn)
    yield sum_pass(shape, stream)


def _attention(shape: ModelShape) -> Iterator[Operation]:
    tokens, hidden = shape.seq, shape.hidden
    queries, keys = shape.heads * shape.width, shape.keys * shape.width
    matrices = 1 if shape.fused_passes else 3
    yield Product("query, key, value", tokens, hidden, queries + 2 * keys, Part.COLUMNS, matrices=matrices)
    yield from joined_gradients(shape, float(tokens * hidden), 3)
    if shape.rotary:
        yield rotary_pass(shape, float(tokens * (queries + keys)))
    yield Attention(
        tokens,
        shape.heads,
        shape.keys,
        shape.width,
        shape.width,
        causal=shape.causal,
        fused=shape.fused_attention,
    )
    yield Product("attention output", tokens, queries, hidden, Part.ROWS)


def _latent_attention(shape: ModelShape, latent: Latent) -> Iterator[Operation]:
    """Yield the operations of latent attention: ranks have the narrow products whole, then their heads."""
    tokens, heads, width = shape.seq, shape.heads, shape.width
    yield Product("query, narrow", tokens, shape.hidden, latent.query)
    yield Product("key, value, narrow", tokens, shape.hidden, latent.keys + latent.rotary)
    yield Pass("norms", float(tokens * (latent.query + latent.keys)), 4, 8, Part.WHOLE, kernels=2)
    yield Product("query", tokens, latent.query, heads * (width + latent.rotary), Part.COLUMNS)
    yield Product("key, value", tokens, latent.keys, heads * 2 * width, Part.COLUMNS)
    turned = tokens * heads * (width + latent.rotary)
    yield Pass("rotary", float(2 * turned), 4, 4, Part.COLUMNS, kernels=4)
    yield Attention(
        tokens,
        heads,
        heads,
        width + latent.rotary,
        width,
        causal=shape.causal,
        fused=shape.fused_attention,
    )
    yield Product("attention output", tokens, heads * width, shape.hidden, Part.ROWS)


def _feed_forward(shape: ModelShape, width: int) -> Iterator[Operation]:
    gates = 2 if shape.gated else 1
    name = "gate, up" if shape.gated else "up"
    matrices = 1 if shape.fused_passes else gates
    yield Product(name, shape.seq, shape.hidden, width * gates, Part.COLUMNS, matrices=matrices)
    yield from joined_gradients(shape, float(shape.seq * shape.hidden), gates)
    yield activation_pass(shape, float(shape.seq * width), Part.COLUMNS)
    yield Product("down", shape.seq, width, shape.hidden, Part.ROWS)


def _experts(shape: ModelShape) -> Iterator[Operation]:
    rows, width = shape.choices, shape.expert_width
    yield Product("router", shape.seq, shape.hidden, shape.experts, Part.STREAM)
    yield from dispatch_passes(shape, rows)
    gates = 2 if shape.gated else 1
    name = "gate, up" if shape.gated else "up"
    experts = partial(Product, part=Part.STREAM, copies=shape.experts, grouped=not shape.fused_passes)
    yield experts(name, rows, shape.hidden, width * gates)
    yield activation_pass(shape, float(rows * width), Part.STREAM)
    yield experts("down", rows, width, shape.hidden)
    if shape.shared_experts:
        yield from _feed_forward(shape, shape.shared_experts * width)
