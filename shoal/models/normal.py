"""Random numbers from their position alone, the same on every kind of GPU and in any order of calls.

The generators of GPUs deal positions out to as many threads as the device has, so that devices of two kinds
draw different numbers from one seed. Here a hash of its position gives each pair of numbers 48 bits, and the
transform of Box and Muller (1958, doi:10.1214/aoms/1177706645) makes them normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.models.dropout import STRIDE, mix

_PAIRS = 1 << 24
"""Pairs that are made at a time: 128 MiB for each intermediate result."""

_LEVELS = 1 << 24
"""Numbers that a uniform variable can take; the largest normal number is then 5.8."""


def normal(shape: Sequence[int], key: int, device: torch.device) -> torch.Tensor:
    """Return independent normal numbers with mean 0 and deviation 1.

    Args:
        shape: Shape of the result.
        key: A 64-bit integer; other keys give other numbers.
        device: Device on which they are made.

    Returns:
        A contiguous tensor, fp32.
    """
    elements = math.prod(shape)
    result = torch.empty(elements + elements % 2, dtype=torch.float32, device=device)
    pairs = result.view(-1, 2)
    for first in range(0, len(pairs), _PAIRS):
        part = pairs[first : first + _PAIRS]
        bits = mix(torch.arange(first, first + len(part), device=device) * STRIDE + key)
        uniform = ((bits & (_LEVELS - 1)) + 1).float() / _LEVELS  # above 0, whose logarithm is infinite
        angle = ((bits >> 24) & (_LEVELS - 1)).float() * (2 * math.pi / _LEVELS)
        radius = uniform.log_().mul_(-2).sqrt_()
        torch.mul(radius, angle.cos(), out=part[:, 0])
        torch.mul(radius, angle.sin(), out=part[:, 1])
    return result[:elements].view(*shape)
