"""Seconds of attention, by its shape.

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
"""

from __future__ import annotations

from functools import lru_cache

from shoal.cluster import Device
from shoal.cost.layout import Layout
from shoal.cost.time.passes import pass_seconds
from shoal.cost.time.products import joined, product_seconds
from shoal.workload import Attention

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
