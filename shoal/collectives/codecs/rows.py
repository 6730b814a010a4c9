"""Vectors as rows of equal length, sums in a fixed order, and what the coders of torch share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_LANES = 32
_STRETCH = 16


def as_rows(values: Tensor, length: int) -> Tensor:
    """Return [rows, length], with zeros after the last element."""
    return pad(values, (0, -values.numel() % length)).view(-1, length)


def not_finite(values: Tensor) -> Tensor:
    """Return where elements are infinite or NaN."""
    return ~torch.isfinite(values)


def ordered_sum(rows: Tensor) -> Tensor:
    """Return the sum of each row in fp64, added in the order in which csrc/codecs/sums.h adds.

    32 lanes are summed over stretches of 16 elements each, then over the stretches, and then the upper half
    of the lanes is added to the lower half until one is left.
    """
    lanes = pad(rows.double(), (0, -rows.shape[1] % _LANES)).view(rows.shape[0], -1, _LANES)
    total = torch.zeros_like(lanes[:, 0])
    for begin in range(0, lanes.shape[1], _STRETCH):
        stretch = torch.zeros_like(total)
        for index in range(begin, min(begin + _STRETCH, lanes.shape[1])):
            stretch += lanes[:, index]
        total += stretch
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def as_bytes(values: Tensor) -> Tensor:
    """Return the elements' bytes, [..., bytes]."""
    return values.contiguous().view(torch.uint8)


def read(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes, which need no alignment, as elements of a type."""
    return payload.clone(memory_format=torch.contiguous_format).view(dtype)
