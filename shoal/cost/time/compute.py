"""Seconds that one device takes for operations, by their shapes.

A product of m rows, k inputs and n outputs takes the longer of the two times below, plus `stall` times the
shorter:

- its 2 m n k FLOP at `peak * product_share * fill * depth`. Products are computed in tiles, `units` at a
  time. `fill` is the useful part of the tiles in all waves, since the last wave and the tiles at the edges
  are partly empty; it is the best over the sizes of tiles that libraries have.
  `depth = k / (k + product_depth)` is for the beginning and end of a tile. These take as many seconds in
  every precision, so `product_depth` scales with the precision's peak;
- its bytes at the memory's rate.

Fused attention takes its FLOP, half of them if it is causal, at its share of the peak in bf16; backward has
2.5 times as many FLOP. What it takes beyond the time of products at `product_share`, such as the
exponentials, takes as many seconds in fp32 and tf32. On cores the share is one of the peak of the type that
computes. Unfused attention is two products for each head and four passes over the scores. Each kernel of any
kind adds `launch` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.cluster import Cluster, Device
from shoal.cost.layout import Layout
from shoal.plan import element_bytes
from shoal.workload import Attention, Operation, Part, Product

__all__ = [
    "FP8_REACHED",
    "Seconds",
    "attention_seconds",
    "casting_seconds",
    "depth_of",
    "host_seconds",
    "operation_seconds",
    "pass_seconds",
    "product_seconds",
    "stream_seconds",
]

_TILES = ((1.0, 1.0, 1.0), (0.5, 1.0, 0.95), (0.5, 0.5, 0.8), (0.25, 0.5, 0.6))
"""Sizes of tiles: rows, columns and rate, each over that of the largest tile."""

_BACKWARD_OF_ATTENTION = 2.5  # the scores again, and two products for each of the two in forward
_SCORES_FORWARD = 2 * 2 + 2 * 2 + 1  # bytes per element: scaled softmax, dropout and its mask, in 16 bit
_SCORES_BACKWARD = 3 * 2 + 2 * 2 + 1


FP8_REACHED = 0.94
"""The share of their peak that products in fp8 reach, relative to the share in bf16: the median of H100,
H200, GH200, B200, B300 and GB200 (stas00/ml-engineering, compute/accelerator).
"""

_STARTS = 30  # operators to start: a buffer, views of it, autograd's function, the group's call, two spans


class Seconds(NamedTuple):
    """Seconds of one rank for one micro-batch.

    Attributes:
        forward: Seconds of forward.
        input: Seconds of the input's gradient, and of all else in backward that cannot be delayed.
        weight: Seconds of the weights' gradients.
    """

    forward: float
    input: float
    weight: float

    @property
    def backward(self) -> float:
        """Seconds of both halves of backward."""
        return self.input + self.weight

    def __add__(self, other: object) -> Seconds:
        """Add each of the three."""
        assert isinstance(other, Seconds)
        return Seconds(self.forward + other.forward, self.input + other.input, self.weight + other.weight)


def operation_seconds(operation: Operation, device: Device, layout: Layout) -> Seconds:
    """Return the seconds of one operation on a rank for a micro-batch."""
    if isinstance(operation, Product):
        return _product(operation, device, layout)
    if isinstance(operation, Attention):
        return _attention(operation, device, layout)
    share = layout.share(operation.part)
    forward, backward = operation.nbytes(layout.width)
    first, second = operation.launches
    return Seconds(
        pass_seconds(device, forward * share, first), pass_seconds(device, backward * share, second), 0.0
    )


def host_seconds(cluster: Cluster) -> float:
    """Return the seconds of compute that one communication takes from a core; 0 on other devices."""
    return _STARTS * cluster.device.launch if cluster.cores else 0.0


@lru_cache(maxsize=1 << 16)
def product_seconds(
    device: Device, precision: str, rows: int, inputs: int, outputs: int, copies: int = 1
) -> float:
    """Return the seconds of `copies` equal products `[rows, inputs] x [inputs, outputs]`, made together."""
    width = element_bytes(precision)
    peak = device.flops(precision)
    share = device.product_share * (FP8_REACHED if precision == "fp8" and "fp8" in device.peak else 1.0)
    fill = _fill(device, rows, outputs, copies) * inputs / (inputs + depth_of(device, precision))
    flop = 2.0 * copies * rows * inputs * outputs
    nbytes = float(width) * copies * (rows * inputs + inputs * outputs + rows * outputs)
    arithmetic = flop / (peak * share * fill)
    memory = nbytes / (device.bandwidth * device.bandwidth_share)
    return device.launch + max(arithmetic, memory) + device.stall * min(arithmetic, memory)


def depth_of(device: Device, precision: str) -> float:
    """Return the number of inputs at which a product reaches half of `product_share`."""
    peak = device.flops(precision)
    return device.product_depth * peak / device.peak.get("bf16", peak)


def pass_seconds(device: Device, nbytes: float, kernels: int = 1) -> float:
    """Return the seconds that so many kernels take to move so many bytes."""
    return kernels * device.launch + nbytes / (device.bandwidth * device.bandwidth_share)


def stream_seconds(device: Device, nbytes: float, kernels: int = 1) -> float:
    """Return the seconds to read and write bytes that no cache holds."""
    share = device.stream_share or device.bandwidth_share
    return kernels * device.launch + nbytes / (device.bandwidth * share)


def attention_seconds(attention: Attention, device: Device, layout: Layout) -> tuple[float, float]:
    """Return the seconds of attention's forward and backward.

    The products that make queries, keys and values are not included.
    """
    share = layout.microbatch / layout.tp / layout.cp
    if not attention.fused:
        return _unfused(attention, device, layout, share)
    flop = attention.flop * share / (2 if attention.causal else 1)
    forward = flop * _attention_pace(device, layout.precision, device.attention_share)
    backward = flop * _attention_pace(device, layout.precision, device.attention_backward_share)
    return device.launch + forward, 2 * device.launch + _BACKWARD_OF_ATTENTION * backward


def _attention_pace(device: Device, precision: str, share: float) -> float:
    """Return the seconds for each FLOP of fused attention."""
    peak = device.flops(precision)
    sixteen = device.peak.get("bf16", peak)
    if device.stall or precision in ("bf16", "fp8"):
        return 1 / ((peak if device.stall else sixteen) * share)
    beside = (1 / share - 1 / device.product_share) / sixteen
    return 1 / (peak * device.product_share) + max(0.0, beside)


def casting_seconds(product: Product, device: Device, layout: Layout) -> Seconds:
    """Return the seconds of the passes in which torch casts a product's operands from 16 to 8 bits.

    Each operand is read for its largest number, read again, and written in 8 bits: 5 bytes for each element.
    The weights' gradient and the input's read operands in another order, which is one more copy in 8 bits.
    """
    rows, inputs, outputs, copies = _sizes(product, layout)
    given, weight, result = rows * inputs * copies, inputs * outputs * copies, rows * outputs * copies
    first = pass_seconds(device, 5.0 * (given + weight), 4)
    return Seconds(
        first,
        pass_seconds(device, 5.0 * result + 2.0 * weight, 3),
        pass_seconds(device, 2.0 * (given + result), 2),
    )


def _product(product: Product, device: Device, layout: Layout) -> Seconds:
    rows, inputs, outputs, copies = _sizes(product, layout)
    return Seconds(
        product_seconds(device, layout.precision, rows, inputs, outputs, copies),
        product_seconds(device, layout.precision, rows, outputs, inputs, copies),
        product_seconds(device, layout.precision, inputs, rows, outputs, copies),
    )


def _sizes(product: Product, layout: Layout) -> tuple[int, int, int, int]:
    """Return a product's rows, inputs, outputs and copies on a rank."""
    inputs, outputs, copies = product.inputs, product.outputs, 1
    rows = product.rows * layout.microbatch / layout.cp
    if product.part is Part.STREAM:
        rows *= layout.share(Part.STREAM) / layout.share(Part.WHOLE)
    if product.copies > 1:
        copies = max(1, product.copies // layout.ep)
        rows = rows * layout.ep / product.copies
    elif product.part is Part.COLUMNS:
        outputs = math.ceil(outputs / layout.tp)
    elif product.part is Part.ROWS:
        inputs = math.ceil(inputs / layout.tp)
    return max(1, round(rows)), inputs, outputs, copies


def _attention(attention: Attention, device: Device, layout: Layout) -> Seconds:
    forward, backward = attention_seconds(attention, device, layout)
    return Seconds(forward, backward, 0.0)


def _unfused(attention: Attention, device: Device, layout: Layout, share: float) -> tuple[float, float]:
    heads = max(1, round(attention.heads * share * layout.cp))
    queries = attention.length // layout.cp
    wide = layout.width / 2
    scores = float(heads) * queries * attention.length
    products = [
        product_seconds(device, layout.precision, queries, attention.key_width, attention.length, heads),
        product_seconds(device, layout.precision, queries, attention.length, attention.value_width, heads),
    ]
    forward = sum(products) + pass_seconds(device, scores * _SCORES_FORWARD * wide, 2)
    return forward, 2 * sum(products) + pass_seconds(device, scores * _SCORES_BACKWARD * wide, 2)


@lru_cache(maxsize=1 << 16)
def _fill(device: Device, rows: int, columns: int, copies: int) -> float:
    """Return the share of the units' time in which a product's tiles do useful work, at the best size."""
    return max(_filled(device, rows, columns, copies, tile) for tile in _TILES)


def _filled(device: Device, rows: int, columns: int, copies: int, tile: Sequence[float]) -> float:
    height, width = device.tile[0] * tile[0], device.tile[1] * tile[1]
    best = 0.0
    for tall, wide in ((height, width), (width, height)):
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide) * copies
        waves = math.ceil(tiles / device.units)
        best = max(best, rows * columns * copies / (waves * device.units * tall * wide))
    return best * tile[2]
