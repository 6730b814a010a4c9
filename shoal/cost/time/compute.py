"""Seconds that one device takes for the operations of a block, by their shapes.

`products.py` has matrix products, `attention.py` attention, and `passes.py` what only moves memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.cluster import Cluster, Device
from shoal.cost.layout import Layout
from shoal.cost.time.attention import attention_seconds
from shoal.cost.time.passes import pass_seconds
from shoal.cost.time.products import product_seconds
from shoal.workload import Attention, Operation, Part, Product

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
    first, second = (layout.experts(operation.copies) * each for each in operation.launches)
    return Seconds(
        pass_seconds(device, forward * share, first), pass_seconds(device, backward * share, second), 0.0
    )


def host_seconds(cluster: Cluster) -> float:
    """Return the seconds of compute that one communication takes from a core; 0 on other devices."""
    return _STARTS * cluster.device.launch if cluster.cores else 0.0


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
        0.0 if product.frozen else pass_seconds(device, 2.0 * (given + result), 2),
    )


def operation_flop(operation: Product | Attention, layout: Layout) -> float:
    """Return the FLOP of an operation's forward and backward on a rank for a micro-batch.

    Causal attention has half of the square of positions. Backward has twice as many as forward, and as many
    where the weight is frozen.
    """
    if isinstance(operation, Product):
        rows, inputs, outputs, copies = _sizes(operation, layout)
        return (4.0 if operation.frozen else 6.0) * copies * rows * inputs * outputs
    share = layout.microbatch / layout.tp / layout.cp
    return 3.0 * operation.flop * share / (2 if operation.causal else 1)


def _product(product: Product, device: Device, layout: Layout) -> Seconds:
    rows, inputs, outputs, copies = _sizes(product, layout)
    weight = 0.0
    if not product.frozen:
        weight = product_seconds(device, layout.precision, inputs, rows, outputs, copies)
    return Seconds(
        product_seconds(device, layout.precision, rows, inputs, outputs, copies),
        product_seconds(device, layout.precision, rows, outputs, inputs, copies),
        weight,
    )


def _sizes(product: Product, layout: Layout) -> tuple[int, int, int, int]:
    """Return a product's rows, inputs, outputs and copies on a rank."""
    inputs, outputs, copies = product.inputs, product.outputs, 1
    rows = product.rows * layout.microbatch / layout.cp
    if product.part is Part.STREAM:
        rows *= layout.share(Part.STREAM) / layout.share(Part.WHOLE)
    if product.copies > 1:
        copies = layout.experts(product.copies)
        rows = rows * layout.ep / product.copies
    elif product.part is Part.COLUMNS:
        outputs = math.ceil(outputs / layout.tp)
    elif product.part is Part.ROWS:
        inputs = math.ceil(inputs / layout.tp)
    return max(1, round(rows)), inputs, outputs, copies


def _attention(attention: Attention, device: Device, layout: Layout) -> Seconds:
    forward, backward = attention_seconds(attention, device, layout)
    return Seconds(forward, backward, 0.0)
