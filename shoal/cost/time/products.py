"""Seconds of matrix products, by their shapes.

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
"""

from __future__ import annotations

import math
from functools import lru_cache

from shoal.cluster import Device
from shoal.plan import element_bytes

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
