"""What docs/concepts/exchange.md sends in place of a vector, in numpy: nothing here is Shoal's.

`sent(text, vector, seed)` returns what is decoded of a vector `[elements]` in fp32. Means are made in fp64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK, CHUNK = 1024, 4096
Vector = NDArray[np.float32]


def split_mix(seed: int) -> int:
    """The first number of SplitMix64 (Steele et al., OOPSLA 2014)."""
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def random_bits(seed: int, count: int) -> NDArray[np.uint64]:
    """32 bits for each index: multiplied by 2^32 / golden ratio, and mixed with the halves of SplitMix64."""
    second, first = divmod(split_mix(seed), 2**32)
    bits = (np.arange(count, dtype=np.uint64) * 0x9E3779B1 + first) % 2**32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D % 2**32) ^ second
    return (bits ^ (bits >> 15)) * 0x846CA68B % 2**32


def to_integers(grid: Vector, bits: NDArray[np.uint64], largest: int) -> Vector:
    """Integers below or above each element, the nearer the likelier."""
    draws = ((bits >> 8) / 2**24).astype(np.float32)
    return np.clip(np.floor(grid + draws), -largest, largest)


def to_e4m3(grid: Vector, bits: NDArray[np.uint64]) -> Vector:
    """Numbers with 3 bits of mantissa below or above each element; multiples of 2^-9 below 2^-6."""
    size = np.abs(grid)
    small = size < 2.0**-6
    spacing = np.where(small, 2.0**-9, 2.0 ** (np.frexp(size)[1] - 1 - 3))
    steps = (size / spacing).astype(np.float64)
    draws = np.where(small, (bits >> 8) / 2**24, (bits >> 12) / 2**20)
    rounded = np.floor(np.where(small, (steps + draws).astype(np.float32), steps + draws))
    return (np.copysign(np.minimum(rounded * spacing, 448), grid)).astype(np.float32)


def sent_block(kind: str, block: Vector, bits: NDArray[np.uint64]) -> Vector:
    """Every element of a block, in few bits."""
    if kind == "sign":
        return np.where(block < 0, -1, 1) * np.abs(block).mean(dtype=np.float64).astype(np.float32)
    largest = np.float32({"int8": 127, "int4": 7, "fp8": 448}[kind])
    scale = np.abs(block).max() / largest
    if scale == 0:
        return np.zeros_like(block)
    grid = block / scale
    codes = to_e4m3(grid, bits) if kind == "fp8" else to_integers(grid, bits, int(largest))
    return codes * scale


def sent_chunk(kind: str, number: int, is_coarse: bool, chunk: Vector) -> Vector:
    """The elements of a chunk that are largest."""
    if kind == "threshold":
        root_mean_square = np.sqrt(np.square(chunk, dtype=np.float64).mean())
        return np.where(np.abs(chunk) > np.float32(number * root_mean_square), chunk, np.float32(0))
    kept = np.argsort(-np.abs(chunk), kind="stable")[: -(-len(chunk) // number)]
    values = chunk[kept]
    if is_coarse:
        size = np.abs(values).astype(np.float64)
        is_larger = size > size.mean()
        for group in (is_larger, ~is_larger):
            if group.any():
                values[group] = np.copysign(to_bfloat16(size[group].mean()), values[group])
    result = np.zeros_like(chunk)
    result[kept] = values
    return result


def to_bfloat16(value: np.float64) -> np.float32:
    """The nearest number with 8 bits of mantissa; of two as near the even one."""
    fraction, exponent = np.frexp(np.float32(value))
    return np.float32(np.ldexp(np.round(fraction * 2**8), exponent - 8))


def sent(text: str, vector: Vector, seed: int) -> Vector:
    """What is decoded of the payload of a vector."""
    kind, number, is_coarse = text.split(":")[0], int((text + ":0").split(":")[1]), text.endswith("2bit")
    if kind == "random":
        begins = np.arange(0, len(vector), number)
        lengths = np.minimum(number, len(vector) - begins)
        chosen = begins + (random_bits(seed, len(begins)) * lengths.astype(np.uint64) // 2**32).astype(int)
        result = np.zeros_like(vector)
        result[chosen] = vector[chosen]
        return result
    if kind in ("topk", "threshold"):
        parts = [
            sent_chunk(kind, number, is_coarse, vector[at : at + CHUNK])
            for at in range(0, len(vector), CHUNK)
        ]
    else:
        bits = random_bits(seed, len(vector))
        places = [slice(at, at + BLOCK) for at in range(0, len(vector), BLOCK)]
        parts = [sent_block(kind, vector[place], bits[place]) for place in places]
    return np.concatenate(parts).astype(np.float32)
