"""Seconds that one device takes for the operations of a block, by their shapes.

The classes below are matrix products, attention, and passes, which only move memory.

Passes over memory
------------------

Seconds of kernels that only read and write memory.

They move their bytes at the memory's rate: `bandwidth_share` of the data sheet's, or `stream_share` where no
cache holds them. Each kernel of any kind adds `launch` seconds.

Matrix products
---------------

Seconds of matrix products, by their shapes.

A product of m rows, k inputs and n outputs is computed in tiles of its result, one at a time on each of the
device's `units`. With tiles of h rows and w columns it takes

    waves = ceil(ceil(m / h) ceil(n / w) copies / units)
    tile  = joined(2 h w k / rate, (h + w) k width / tile_bandwidth) + 2 h w product_depth / rate
    joined(waves tile, bytes / memory's rate) + launch

where `rate` is a unit's part of `peak * product_share`. The last wave is partly empty, and so are tiles at
the edges. `product_depth` is the beginning and end of a tile, the write of its result among them, as a number
of inputs in bf16; these take as many seconds in every precision. `joined(a, b) = (a^4 + b^4)^(1/4)` is a
little more than the longer of two times that hide each other; on cores it is the longer and `stall` times
the shorter.

A library has tiles of several sizes. Where these leave units empty, it divides the inputs too, among up to
16 times as many tiles (split-k), whose sums in fp32 are written, and added up by a second kernel; no library
was seen to do so in fp8. The best choice counts.

Constants are fitted to single products (`benchmarks/fit_devices.py`). In steps that take long, power and heat
lower the clock: then products run at `sustained` times that rate.

Attention
---------

Seconds of attention, by its shape.

Fused attention gives each unit a tile of 128 queries of one head, which it compares with one key after
another; if it is causal, only with those before. For each score it computes the FLOP of two products, at the
units' part of the peak, and one exponential, at `exponentials` a second. These hide each other in part:

    score = (a^3 + (1 / exponentials)^3)^(1/3)

where a is such that heads of width 128 reach `attention_share` of the peak in bf16. So narrow heads reach a
smaller share, since their exponentials are as many. A tile's beginning and end take as long as
`attention_depth` more keys. Tiles end at different times: half of the longest tile's seconds are lost at the
end. Reading and writing queries, keys, values and results takes place beside, as in products.

Backward has 2.5 times as many FLOP, at `attention_backward_share`. In fp32 and tf32 the products take longer,
all else as long. With fp8 attention is computed in bf16. On cores, whose share is one of the peak of
the type that computes, `exponentials` is 0: no rate is known, and none is counted.

Unfused attention is two products for each head, and four passes over the scores.

The host
--------

Seconds that the host takes to start a device's operations, and when the device waits for it.

The host starts kernels one after another; the device runs them in that order, each when it is started and the
one before is done. The host does not wait for the device: while a long operation runs, it starts those that
follow. So the device waits only for what the host could not start ahead. For pieces i = 1..n of work between
two synchronisations, which take the host h and the device d seconds, the last is done after

    max over k of (h_1 + .. + h_k + d_k + .. + d_n)

(Johnson, "Optimal two- and three-stage production schedules", 1954). A program that synchronises before the
optimizer's update has such a stretch from the embedding to the end and back. `waits_of` gives what it takes
beyond the device's own seconds. In a program that never synchronises, steps follow one another, and take the
longer of the host's and of the device's seconds. There the host is ahead when a step ends: what the device
then does, such as the optimizer's update, hides as many seconds of its waits.

Each kernel takes the host `dispatch` seconds, which include Python, torch's dispatcher and autograd. A
product is one kernel for each of its weights, and twice as many in backward; fused attention is one, and
three. A gradient that torch adds to its sum in fp32 is one. The call of a compiled graph takes `graph`
seconds beside its kernels: guards, autograd's function, the outputs. An eager block with recompute=selective
is such a graph, whose operators run one by one.

Programs with fused kernels start the products and casts of each expert by themselves. The host starts none of
these ahead: it first reads how many rows each expert got. So the device waits for what the host takes beyond
the device's own seconds for all experts of a rank, in forward and in backward (`waits_for_experts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.predict.cost.layout import Layout
from shoal.spec.cluster import Cluster, Device
from shoal.spec.plan import element_bytes
from shoal.spec.workload import Attention, Block, Operation, Part, Pass, Product


def pass_seconds(device: Device, nbytes: float, kernels: int = 1) -> float:
    """Return the seconds that so many kernels take to move so many bytes."""
    return kernels * device.launch + nbytes / (device.bandwidth * device.bandwidth_share)


def stream_seconds(device: Device, nbytes: float, kernels: int = 1) -> float:
    """Return the seconds to read and write bytes that no cache holds."""
    share = device.stream_share or device.bandwidth_share
    return kernels * device.launch + nbytes / (device.bandwidth * share)


_TILES = ((1.0, 1.0), (0.5, 1.0), (0.5, 0.5), (0.25, 0.5))
"""Sizes of tiles: rows and columns, each over that of the largest tile; all lie both ways."""

_SPLITS = (2, 3, 4, 6, 8, 12, 16)
"""Numbers of parts into which the inputs are divided."""

_SUM_WIDTH = 4  # bytes of a partial sum, which is in fp32
_RESULT_WIDTH = 2  # bytes of an element of the result of products in fp8


@lru_cache(maxsize=1 << 16)
def product_seconds(
    device: Device, precision: str, rows: int, inputs: int, outputs: int, copies: int = 1
) -> float:
    """Return the seconds of `copies` equal products `[rows, inputs] x [inputs, outputs]`, made together."""
    is_fp8 = precision == "fp8" and "fp8" in device.peak
    width = 1 if is_fp8 else element_bytes(precision)
    units = device.units
    rate = device.product_rate(precision) / units
    depth = depth_of(device, precision)
    feed = device.tile_rate(precision)
    results = rows * outputs * copies
    nbytes = width * copies * inputs * (rows + outputs) + max(width, _RESULT_WIDTH) * results
    stream = device.bandwidth * device.bandwidth_share
    memory = nbytes / stream
    is_split = units > 1 and not is_fp8

    def seconds(waves: int, area: float, edges: float, deep: float) -> float:
        arithmetic = 2 * area * deep / rate
        if feed:
            arithmetic = joined(arithmetic, edges * deep * width / feed)
        return joined(waves * (arithmetic + 2 * area * depth / rate), memory, device.stall)

    best = math.inf
    for height, breadth in _tiles(device):
        tiles = math.ceil(rows / height) * math.ceil(outputs / breadth) * copies
        area, edges = height * breadth, height + breadth
        best = min(best, seconds(math.ceil(tiles / units), area, edges, inputs))
        if not is_split or tiles >= 2 * units:
            continue
        for split in _SPLITS:
            sums = (split + 1) * _SUM_WIDTH * results / (2 * stream) + device.launch
            best = min(best, sums + seconds(math.ceil(split * tiles / units), area, edges, inputs / split))
    return device.launch + best


def depth_of(device: Device, precision: str) -> float:
    """Return the number of inputs that take as long as the beginning and end of a tile."""
    peak = device.flops(precision)
    return device.product_depth * peak / device.peak.get("bf16", peak)


def joined(first: float, second: float, stall: float = 0.0) -> float:
    """Return the seconds of two kinds of work that hide each other.

    Args:
        first: Seconds of the one alone.
        second: Seconds of the other alone.
        stall: Share of the shorter that nothing hides.
    """
    longer, shorter = (first, second) if first > second else (second, first)
    if stall or not shorter:
        return longer + stall * shorter
    return float(longer * (1 + (shorter / longer) ** 4) ** 0.25)


@lru_cache(maxsize=256)
def _tiles(device: Device) -> tuple[tuple[float, float], ...]:
    """Return the rows and columns of the tiles that products may have."""
    tall, wide = device.tile
    lying = [(tall * rows, wide * columns) for rows, columns in _TILES]
    return tuple(dict.fromkeys((*lying, *((columns, rows) for rows, columns in lying))))


_QUERIES = 128  # of a tile
_WIDTH = 128  # of a head at which the shares are measured
_HIDDEN = 3.0  # exponent: products and exponentials hide each other less than arithmetic and memory do
_IDLE = 0.5  # share of the longest tile's seconds
_BACKWARD = 2.5  # the scores again, and two products for each of the two in forward
_SCORES_FORWARD = 2 * 2 + 2 * 2 + 1  # bytes per element: scaled softmax, dropout and its mask, in 16 bit
_SCORES_BACKWARD = 3 * 2 + 2 * 2 + 1


def attention_seconds(attention: Attention, device: Device, layout: Layout) -> tuple[float, float]:
    """Return the seconds of attention's forward and backward.

    The products that make queries, keys and values are not included.
    """
    if not attention.fused:
        return _unfused(attention, device, layout)
    tiles, keys, most = _tiles_of(attention, device, layout)
    width = (attention.key_width + attention.value_width) / 2
    elements = layout.microbatch * attention.length / layout.cp / layout.tp
    elements *= 2 * width * (attention.heads + attention.kv_heads)
    memory = elements * min(layout.width, 2) / (device.bandwidth * device.bandwidth_share)

    def seconds(share: float) -> float:
        score = _QUERIES * _score_seconds(device, layout.precision, width, share)
        longest = score * (most + device.attention_depth)
        every = tiles * score * (keys + device.attention_depth) / device.units
        return joined(max(every + _idle(device) * longest, longest), memory)

    forward = seconds(device.attention_share)
    backward = _BACKWARD * seconds(device.attention_backward_share)
    return device.launch + forward, 2 * device.launch + backward


def _idle(device: Device) -> float:
    """Return the share of the longest tile's seconds that units wait for it; one unit alone does not."""
    return _IDLE if device.units > 1 else 0.0


def _tiles_of(attention: Attention, device: Device, layout: Layout) -> tuple[float, float, float]:
    """Return the number of tiles on a rank, and the keys of a tile: the mean and the most."""
    length = attention.length
    tiles = attention.heads * layout.microbatch * length / _QUERIES / layout.tp / layout.cp
    # A causal tile compares with the keys up to its last query; loops on a core end at each query's own.
    most = min(length, _QUERIES) if device.units > 1 else 0
    keys = (length + most) / 2 if attention.causal else length
    return tiles, keys, length


@lru_cache(maxsize=1 << 12)
def _score_seconds(device: Device, precision: str, width: float, share: float) -> float:
    """Return the seconds that a unit takes for one score, its exponential and its part of the result."""
    peak = device.flops(precision)
    if device.stall:
        return 4 * width * device.units / (peak * share)
    sixteen = device.peak.get("bf16", peak)
    clock = device.sustained / device.units
    exponential = 1 / (device.exponentials * device.sustained) if device.exponentials else 0.0
    usual = max(4 * _WIDTH / (sixteen * clock * share), exponential)
    products = (usual**_HIDDEN - exponential**_HIDDEN) ** (1 / _HIDDEN) * width / _WIDTH
    found = (products**_HIDDEN + exponential**_HIDDEN) ** (1 / _HIDDEN)
    if precision not in ("bf16", "fp8"):
        found += max(0.0, 1 / peak - 1 / sixteen) * 4 * width / (clock * device.product_share)
    return float(found)


def _unfused(attention: Attention, device: Device, layout: Layout) -> tuple[float, float]:
    heads = max(1, round(attention.heads * layout.microbatch / layout.tp))
    queries = attention.length // layout.cp
    wide = layout.width / 2
    scores = float(heads) * queries * attention.length
    products = [
        product_seconds(device, layout.precision, queries, attention.key_width, attention.length, heads),
        product_seconds(device, layout.precision, queries, attention.length, attention.value_width, heads),
    ]
    forward = sum(products) + pass_seconds(device, scores * _SCORES_FORWARD * wide, 2)
    return forward, 2 * sum(products) + pass_seconds(device, scores * _SCORES_BACKWARD * wide, 2)


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


_OF_ATTENTION = (1, 3)  # kernels of fused attention, forward and backward
_OF_UNFUSED = (4, 8)  # two products, softmax and dropout
_GRAPH = 6.0  # starts of operators that the call of a compiled graph takes, where no figure is known


class Stretch(NamedTuple):
    """Equal pieces of work in a row.

    Attributes:
        number: Number of pieces.
        host: Seconds that the host takes to start one.
        device: Seconds that the device takes for one.
    """

    number: int
    host: float
    device: float


def starting_seconds(
    block: Block, device: Device, layout: Layout, recompute: str = "none"
) -> tuple[float, float]:
    """Return the host's seconds for a block's forward and backward.

    Args:
        block: The block as it runs: compiled, or eager.
        device: Device whose host starts the operations.
        layout: How the block is laid over ranks.
        recompute: none, selective or full.
    """
    forward, backward = starts_of(block, layout, recompute)
    graphs = block.graphs
    if recompute == "selective" and block.sums and not graphs:
        graphs = 1
    calls = graphs * (device.graph or _GRAPH * device.dispatch)
    return forward * device.dispatch + calls, backward * device.dispatch + calls


def starts_of(block: Block, layout: Layout, recompute: str = "none") -> tuple[int, int]:
    """Return how many operations the host starts for a block's forward and backward.

    The arguments are those of `starting_seconds`.
    """
    forward, backward = 0, block.sums
    again = 0
    for operation in block.operations:
        started = _starts(operation, layout)
        forward += started[0]
        backward += started[1]
        if recompute == "full" or (recompute == "selective" and repeats(operation)):
            again += started[0]
    return forward, backward + again


def repeats(operation: Operation) -> bool:
    """Return whether a selective recompute makes an operation again: a pass, unless it says otherwise."""
    return isinstance(operation, Pass) and operation.again


def waits_for_experts(block: Block, device: Device, layout: Layout) -> tuple[float, float]:
    """Return the seconds of forward and backward in which a device waits for its experts' kernels to start.

    This is what the host takes to start them one by one, beyond what the device takes for them. It starts
    none ahead: it first reads how many rows each expert got.
    """
    waits = [0.0, 0.0]
    for operation in block.operations:
        if isinstance(operation, Attention) or not _is_started_by_expert(operation):
            continue
        seconds = operation_seconds(operation, device, layout)
        for index, started in enumerate(_starts(operation, layout)):
            waits[index] += started * device.dispatch - (seconds.backward if index else seconds.forward)
    return max(0.0, waits[0]), max(0.0, waits[1])


def _is_started_by_expert(operation: Product | Pass) -> bool:
    return operation.copies > 1 and not (isinstance(operation, Product) and operation.grouped)


def _starts(operation: Operation, layout: Layout) -> tuple[int, int]:
    """Return how many kernels the host starts for an operation's forward and backward."""
    if isinstance(operation, Attention):
        return _OF_ATTENTION if operation.fused else _OF_UNFUSED
    times = layout.experts(operation.copies) if _is_started_by_expert(operation) else 1
    if isinstance(operation, Product):
        return times * operation.matrices, (1 if operation.frozen else 2) * times * operation.matrices
    forward, backward = operation.launches
    return times * forward, times * backward


def waits_of(stretches: Sequence[Stretch]) -> float:
    """Return the seconds that the device waits for the host, over stretches of work in a row."""
    device = sum(each.number * each.device for each in stretches)
    longest = before = 0.0
    after = device
    for number, host, seconds in stretches:
        # Within a stretch of equal pieces, the first or the last decides.
        first = before + host + after
        last = before + number * host + after - (number - 1) * seconds
        longest = max(longest, first, last)
        before, after = before + number * host, after - number * seconds
    return longest - device
