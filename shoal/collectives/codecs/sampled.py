"""The kind that sends one element of every N, at positions that all ranks compute alike: random, with torch.

A payload is the fp32 values alone, one of each stretch of N elements; the last stretch may be shorter. The
position in a stretch of n elements is n * hash(seed, stretch) / 2^32. A stretch with an element that is not
finite sends NaN. csrc/codecs/sampled.h does the same arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.codecs.random_bits import random_bits
from shoal.collectives.codecs.rows import as_bytes, as_rows, not_finite, read


def encode_sampled(number: int, values: Tensor, payload: Tensor, seed: int) -> int:
    """Write the payload of a vector; return its bytes."""
    if not values.numel():
        return 0
    sent = values[_indices(number, values.numel(), seed, values.device)]
    content = as_bytes(torch.where(not_finite(as_rows(values, number)).any(1), torch.nan, sent))
    payload[: content.numel()] = content
    return content.numel()


def decode_sampled(number: int, payload: Tensor, elements: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the sent elements in the vector, and their values."""
    stretches = -(-elements // number)
    return _indices(number, elements, seed, payload.device), read(payload[: 4 * stretches], torch.float32)


def _indices(number: int, elements: int, seed: int, device: torch.device) -> Tensor:
    stretches = -(-elements // number)
    begins = number * torch.arange(stretches, device=device)
    lengths = torch.clamp(elements - begins, max=number)
    return begins + ((random_bits(seed, stretches, device) * lengths) >> 32)
