"""Bytes that a rank keeps for a micro-batch from forward to backward, block by block.

A Workload lists the tensors that a block's forward keeps, and how tensor parallelism divides each. When a
block is laid over ranks, that list changes:

- `recompute` drops the tensors of a layer that its backward makes again; embedding and end keep theirs.
- With tp > 1, results of products that are divided by rows are partial sums, and no rank keeps them.
- Ulysses keeps attention's result twice: by heads for its own backward, by positions for the next operation.
- With tp > 1 the end keeps the logits in the type of the compute, and 22 bytes per token: 8 for the index of
  the embedding, 8 for that of the target, 4 for the normalizer of the loss and 2 for its masks.

For a moment a block's backward also holds working memory. It is the larger of the two amounts below, at the
product where it is largest, among products with a result as wide as the stream (in a feed-forward layer, the
last one):

- the gradients of the product's input and of the two tensors that this input was made from, without the input
  itself: twice the bytes of the input, or three times where the input was not kept, because the weight is
  frozen and has no adapter;
- the gradients of the product's input and of its weight. Where tensor parallelism splits the sequence, also
  the gathered gradient of its output, in two orders if there are several samples.

Where attention is not fused, the gradients of its scores, twice the bytes of the scores, may be more.

The selective recompute of torchtitan
-------------------------------------

The selective recompute of torchtitan, which makes the result of every second product again.

Shoal's recompute=selective keeps the results of all products and of attention. torchtitan keeps those of
attention and of every second product of a layer, in the order of its forward, which is query, key, value,
output, gate, up, down (`torchtitan/models/llama3/parallelize.py`, its option "op"). To predict a step of
torchtitan, change the Workload with `every_second_product`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from shoal.predict.cost.layout import Layout
from shoal.spec.workload import Attention, Block, Keep, Part, Product, Saved, Workload

_FP32 = 4  # bytes
_OF_TOKEN = 22  # bytes per token that the end keeps with tp > 1


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes of a block on a rank for one micro-batch.

    Attributes:
        kept: Bytes kept from forward to backward.
        whole: Bytes of all activations, after backward has made again those that were not kept.
        working: Other bytes that backward holds at its fullest moment.
        halves: Bytes that W needs after I: inputs of products, and gradients of their outputs.
        dense: Number of trained parameters on the rank after tensor parallelism, without experts.
        experts: Number of trained parameters of the rank's experts.
        frozen: Number of other parameters on the rank, without experts.
        frozen_experts: Number of other parameters of the rank's experts.
        stored: Bytes that a file keeps from forward to backward.
    """

    kept: float
    whole: float
    working: float
    halves: float
    dense: float
    experts: float
    frozen: float = 0.0
    frozen_experts: float = 0.0
    stored: float = 0.0

    @property
    def parameters(self) -> float:
        """Number of the block's trained parameters on the rank."""
        return self.dense + self.experts

    @property
    def weights(self) -> float:
        """Number of all of the block's parameters on the rank."""
        return self.dense + self.experts + self.frozen + self.frozen_experts


@dataclass(frozen=True, slots=True)
class EndMemory:
    """Bytes that the loss and the head hold for a moment, on the rank that has the end.

    Attributes:
        loss: Bytes when the loss's backward has made the logits' gradient. They include the gradient of the
            logarithms, unless the vocabulary is divided, since it is then made in place, or the loss is
            compiled.
        head: Bytes in the head's backward: the gradients of its input and of its weight. Where tensor
            parallelism splits the sequence, also the gathered input, its gradient twice before it is reduced,
            and with several samples the logits' gradient in the order of the parts.
    """

    loss: float
    head: float


def block_memory(block: Block, workload: Workload, layout: Layout, *, is_layer: bool) -> BlockMemory:
    """Return the memory of a block.

    Args:
        block: A block of the workload.
        workload: The Workload, which says the stream's width and length.
        layout: How the block is laid over ranks.
        is_layer: Whether the block is a layer, so that `recompute` applies to it.
    """
    policy = layout.policy(block, is_layer=is_layer)
    block, end = block.under(layout.compile), workload.end.under(layout.compile)
    kept = _saved_bytes(block, layout, policy)
    whole = _saved_bytes(block, layout, "none")
    stream = stream_bytes(workload, layout)
    if policy == "selective" and layout.tp == 1:
        whole += stream  # the result of the last product, which no later operation reads
    if block is end and layout.tp > 1:
        extra = _extra_of_end(block, workload, layout)
        kept, whole = kept + extra, whole + extra
    return BlockMemory(
        kept=kept,
        whole=whole,
        working=stream + max(_working(block, workload, layout), default=0.0),
        halves=_operands(block, layout),
        dense=block.parameters.whole + block.parameters.divided / layout.tp,
        experts=block.parameters.experts / layout.ep,
        frozen=block.frozen.whole + block.frozen.divided / layout.tp,
        frozen_experts=block.frozen.experts / layout.ep,
    )


def in_file(block: BlockMemory) -> BlockMemory:
    """Return the memory of a block whose activations are in a file from forward to backward."""
    return replace(block, kept=0.0, stored=block.kept)


def kept_bytes(block: Block, workload: Workload, layout: Layout, *, is_layer: bool) -> float:
    """Return the bytes of a block that are kept from forward to backward; arguments as of `block_memory`."""
    policy = layout.policy(block, is_layer=is_layer)
    block, end = block.under(layout.compile), workload.end.under(layout.compile)
    kept = _saved_bytes(block, layout, policy)
    return kept + _extra_of_end(block, workload, layout) if block is end and layout.tp > 1 else kept


def end_memory(workload: Workload, layout: Layout) -> EndMemory:
    """Return the bytes that loss and head hold for a moment."""
    end = workload.end.under(layout.compile)
    logits = _logits(end, layout)
    heads = [each for each in end.operations if isinstance(each, Product)]
    weight = 0.0
    if heads and not heads[-1].frozen:
        weight = heads[-1].inputs * heads[-1].outputs * layout.width / layout.tp
    stream = stream_bytes(workload, layout)
    at_head = stream + weight
    if _splits_sequence(layout):
        at_head += 3 * stream * layout.tp + (logits if layout.microbatch > 1 else 0.0)
    return EndMemory(loss=logits * (2 if layout.tp == 1 and not end.graphs else 1), head=at_head)


def stream_bytes(workload: Workload, layout: Layout) -> float:
    """Return the bytes of the hidden state between two layers, or of its gradient."""
    return layout.width * workload.length * workload.hidden * layout.share(Part.STREAM)


def _saved_bytes(block: Block, layout: Layout, recompute: str) -> float:
    total = sum(_bytes_of(each, layout) for each in block.saved if each.keep.under(recompute))
    if recompute == "none" and layout.context == "ulysses" and layout.cp > 1:
        results = sum(each.length * each.heads * each.value_width for each in block.attentions)
        total += layout.width * results * layout.share(Part.COLUMNS)
    return total


def _bytes_of(saved: Saved, layout: Layout) -> float:
    if saved.part is Part.ROWS and layout.tp > 1:
        return 0.0  # a partial sum
    return saved.nbytes(layout.width) * layout.share(saved.part)


def _extra_of_end(end: Block, workload: Workload, layout: Layout) -> float:
    """Return the bytes that the end keeps with tp > 1 beyond the tensors that it lists."""
    tokens = layout.microbatch * workload.length / layout.cp
    return _OF_TOKEN * tokens + _logits(end, layout) - _logits(end, layout, _FP32)


def _logits(end: Block, layout: Layout, width: int | None = None) -> float:
    """Return the bytes of the logits, of the type of the compute or a given width.

    They are fp32 if they are whole and no compiled loss reads them.
    """
    products = [each for each in end.operations if isinstance(each, Product)]
    if not products:
        return 0.0
    if width is None:
        width = _FP32 if layout.tp == 1 and not end.graphs else layout.width
    return width * products[-1].rows * products[-1].outputs * layout.share(Part.COLUMNS)


def _working(block: Block, workload: Workload, layout: Layout) -> Iterator[float]:
    """Yield, by operation, the bytes that backward may hold beside the stream's gradient."""
    gathered = 0.0
    if _splits_sequence(layout):
        gathered = (1 + (layout.microbatch > 1)) * layout.tp * stream_bytes(workload, layout)
    for product, following in zip_longest(block.operations, block.operations[1:]):
        if not isinstance(product, Product) or product.outputs != workload.hidden:
            continue
        is_adapted = isinstance(following, Product) and not following.frozen
        kept = 0 if product.frozen and not is_adapted else 1
        divided = {Part.ROWS: Part.COLUMNS, Part.STREAM: Part.STREAM}.get(product.part, Part.WHOLE)
        inputs = layout.width * product.rows * product.inputs * layout.share(divided)
        weight = 0.0
        if not product.frozen:
            weight = float(layout.width * product.inputs * product.outputs * product.copies)
        weight /= layout.ep if product.copies > 1 else layout.tp if product.part is Part.ROWS else 1
        yield max((3 - kept) * inputs, inputs + weight + gathered)
    for attention in block.attentions:
        if not attention.fused:
            scores = attention.length**2 * attention.heads * layout.share(Part.COLUMNS)
            yield 2 * layout.width * scores


def _operands(block: Block, layout: Layout) -> float:
    """Return the bytes of products' inputs and of their outputs' gradients.

    Products that follow one another and have equally wide inputs share one input.
    """
    elements, before = 0.0, 0
    for operation in block.operations:
        if not isinstance(operation, Product):
            before = 0 if isinstance(operation, Attention) else before
            continue
        around, within = Part.STREAM, Part.COLUMNS
        if operation.part in (Part.WHOLE, Part.STREAM):
            around = within = operation.part
        is_down = operation.part is Part.ROWS
        if is_down or operation.inputs != before:
            elements += operation.rows * operation.inputs * layout.share(within if is_down else around)
        elements += operation.rows * operation.outputs * layout.share(around if is_down else within)
        before = 0 if is_down else operation.inputs
    return layout.width * elements


def _splits_sequence(layout: Layout) -> bool:
    return layout.tp > 1 and layout.tensor != "plain"


_FP32_BYTES = 4.0  # bytes


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers of one stage; each sum is over all layers before a position, in backward's order.

    Attributes:
        layers: Memory of each layer.
        peak_candidates: Positions of the layers at which memory can be highest; between them it changes
            evenly.
        kept: Sums of bytes kept for a micro-batch.
        gradients: Sums of bytes of fp32 gradients on the rank.
        freed: Sums of bytes of fp32 gradients with those of experts times ep, because ep times fewer ranks
            share the shards of experts' gradients.
    """

    layers: tuple[BlockMemory, ...]
    peak_candidates: tuple[int, ...]
    kept: tuple[float, ...]
    gradients: tuple[float, ...]
    freed: tuple[float, ...]

    @classmethod
    def of(cls, layers: Sequence[BlockMemory], ep: int) -> Stack:
        """Make a stack of layers in forward's order, whose experts are spread over ep ranks."""
        turned = tuple(layers[::-1])
        firsts = {layer: place for place, layer in reversed(list(enumerate(turned)))}
        places = {0, 1, 2, len(turned) - 1, *firsts.values()} & set(range(len(turned)))
        return cls(
            turned,
            tuple(sorted(places)),
            tuple(accumulate((each.kept for each in turned), initial=0.0)),
            tuple(accumulate((_FP32_BYTES * each.parameters for each in turned), initial=0.0)),
            tuple(
                accumulate((_FP32_BYTES * (each.dense + ep * each.experts) for each in turned), initial=0.0)
            ),
        )


def every_second_product(workload: Workload) -> Workload:
    """Return a Workload whose dense layers keep every second product's result under recompute=selective."""
    return workload.with_layers(_changed)


def _changed(layer: Block) -> Block:
    products = [each for each in layer.operations if isinstance(each, Product)]
    if not all(product.is_divided for product in products):
        return layer  # experts: their products are not divided
    rest = [each for each in layer.saved if each.keep not in (Keep.RESULTS, Keep.SELECTIVE)]
    eager = None if layer.eager is None else _changed(layer.eager)
    return replace(layer, saved=(*rest, *_attention(layer), *_results(layer)), remade=0.5, eager=eager)


def _attention(layer: Block) -> Iterator[Saved]:
    for attention in layer.attentions:
        heads = float(attention.length * attention.heads)
        yield Saved("attention's result", heads * attention.value_width, Part.COLUMNS, Keep.RESULTS)
        if attention.fused:
            yield Saved("log-sum-exp", heads, Part.COLUMNS, Keep.RESULTS, 4)


def _results(layer: Block) -> Iterator[Saved]:
    """Yield the results of products; those that are not kept but that backward reads are made again."""
    for index, (name, elements, part) in enumerate(_matrices(layer)):
        is_kept = index % 2 == 0
        if part is Part.COLUMNS:
            yield Saved(name, elements, part, Keep.RESULTS if is_kept else Keep.REST)
        elif is_kept:
            yield Saved(name, elements, part, Keep.SELECTIVE)


def _matrices(layer: Block) -> Iterator[tuple[str, float, Part]]:
    """Yield name, elements and part of the result of each matrix; a Product may have several."""
    attention = next(layer.attentions, None)
    for product in layer.operations:
        if not isinstance(product, Product):
            continue
        names = product.name.split(", ")
        widths = [product.outputs / len(names)] * len(names)
        if attention is not None and len(names) == 3:
            key, value = attention.key_width, attention.value_width
            widths = [attention.heads * key, attention.kv_heads * key, attention.kv_heads * value]
        for name, width in zip(names, widths, strict=True):
            yield name, float(product.rows * width), product.part
