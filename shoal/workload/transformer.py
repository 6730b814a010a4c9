"""The Workload of a transformer, computed from its shape.

With n tokens of a sample, H hidden, A heads of width D, K key-value heads, F the feed-forward width, a
layer's operations are:

    products    query n H (A D), key and value n H (K D) each, output n (A D) H; up n H F, gate n H F if
                gated, down n F H; with E experts, of which each token goes to k: the router n H E, and up,
                gate, down with k n rows over E weights; shared experts count as a dense layer
    attention   n, A, K, D
    passes      norms, rotary embedding, residual sums, the feed-forward's activation, and dropout if any

`shoal.workload.passes` has the bytes of passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shoal.workload.ends import embedding_of, end_of
from shoal.workload.kept import kept_by_layer
from shoal.workload.model_shape import Latent, ModelShape
from shoal.workload.operation import Attention, Operation, Part, Pass, Product
from shoal.workload.passes import (
    activation_pass,
    compiled_loss,
    dispatch_passes,
    joined_gradients,
    norm_pass,
    rotary_pass,
    sum_pass,
)
from shoal.workload.workload import Block, Parameters, Workload


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
