"""Random bits without a state: a hash of a seed and of the index of an element.

csrc/codecs/random_bits.h computes the same numbers. Two keys of 32 bits are made from the seed with the
mixing function of SplitMix64 (Steele et al., OOPSLA 2014). An index is multiplied by 2^32 / golden ratio, and
mixed with both keys by the multipliers of Chris Wellons' lowbias32 (nullprogram.com/blog/2018/07/31). Only
the upper bits are used.
"""

from __future__ import annotations

import torch
from torch import Tensor

_32_BITS = 0xFFFF_FFFF
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF


def random_bits(seed: int, count: int, device: torch.device) -> Tensor:
    """Return a number of 32 random bits for each of the indices 0 to count - 1, as int64."""
    first, second = _keys(seed)
    mixed = (torch.arange(count, device=device) * 0x9E3779B1 + first) & _32_BITS
    mixed ^= mixed >> 16
    mixed = ((mixed * 0x7FEB352D) & _32_BITS) ^ second
    mixed ^= mixed >> 15
    return (mixed * 0x846CA68B) & _32_BITS


def uniform(bits: Tensor) -> Tensor:
    """Return 24 of the 32 bits as fp32 numbers from 0 to 1, without 1."""
    return (bits >> 8).float() * 2.0**-24


def _keys(seed: int) -> tuple[int, int]:
    mixed = (seed + 0x9E3779B97F4A7C15) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    mixed ^= mixed >> 31
    return mixed & _32_BITS, mixed >> 32
