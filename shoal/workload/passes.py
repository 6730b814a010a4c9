"""Passes over memory: the bytes of norms, activations, rotary embedding, sums and the loss.

Bytes are for an element of 16 bits: two for each time that it is read or written. One kernel does a pass if
`fused_passes` is True. If not, torch runs one operator after another, each of which reads and writes memory:
RMSNorm's forward on cores squares, takes the mean, multiplies by the root and by the weight; the rotary
embedding and the loss compute in fp32, and cast to it and back. A test counts the bytes of all operators that
run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.workload.model_shape import ModelShape
from shoal.workload.operation import Part, Pass


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
