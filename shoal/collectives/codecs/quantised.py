"""Kinds that send every element in fewer bits, with torch's operators: int8, int4, fp8, sign.

A payload is a scale in fp32 for each block of 1,024 elements, then the elements: int8 and fp8 a byte each,
int4 two a byte (the first in the lower half, q + 8), sign eight a byte (the first in the lowest bit; 1 is
negative). Where a block has an element that is not finite, its scale is NaN, and every element of it is
decoded to NaN.

int8, int4 and fp8 round up or down at random, the nearer the likelier, so that the mean of a decoded element
is the element; the largest magnitude of a block is the largest number of the format. A scale is at most the
one with which that number is finite. sign has the mean magnitude of the block (Seide et al., Interspeech
2014). csrc/codecs/quantised.h does the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.collectives.codecs.random_bits import random_bits, uniform
from shoal.collectives.codecs.rows import as_bytes, as_rows, not_finite, ordered_sum, read
from shoal.plan import BLOCK


def encode_quantised(kind: str, values: Tensor, payload: Tensor, seed: int) -> int:
    """Write the payload of a vector; return its bytes."""
    if not values.numel():
        return 0
    blocks = as_rows(values, BLOCK)
    if kind == "sign":
        scales, codes = _mean_magnitudes(values, blocks), (values < 0).to(torch.uint8)
    else:
        largest, round_to_codes = _FORMATS[kind]
        scales = blocks.abs().amax(1) / blocks.new_tensor(largest)
        scales = torch.where(not_finite(scales), torch.nan, scales.clamp(max=_most_scale(largest)))
        grid = (blocks / scales[:, None]).view(-1)[: values.numel()]
        codes = round_to_codes(grid, random_bits(seed, values.numel(), values.device))
        codes = torch.where((scales > 0).repeat_interleave(BLOCK)[: values.numel()], codes, _ZERO[kind])
    content = torch.cat([as_bytes(scales), _packed(codes, _BITS[kind])])
    payload[: content.numel()] = content
    return content.numel()


def decode_quantised(kind: str, payload: Tensor, elements: int) -> Tensor:
    """Return the decoded elements, in fp32."""
    scale_bytes = 4 * -(-elements // BLOCK)
    code_bytes = -(-elements * _BITS[kind] // 8)
    scales = read(payload[:scale_bytes], torch.float32).repeat_interleave(BLOCK)[:elements]
    codes = _unpacked(payload[scale_bytes : scale_bytes + code_bytes], _BITS[kind])[:elements]
    if kind == "sign":
        return torch.where(codes == 1, -scales, scales)
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float() * scales
    return (codes.view(torch.int8) if kind == "int8" else codes.to(torch.int8) - 8).float() * scales


def _most_scale(largest: float) -> float:
    """Return the largest fp32 scale of which `largest` times is no more than the largest fp32 number."""
    limit = torch.finfo(torch.float32).max
    most = torch.tensor(limit) / largest
    return (most if most.item() * largest <= limit else torch.nextafter(most, torch.zeros(()))).item()


def _mean_magnitudes(values: Tensor, blocks: Tensor) -> Tensor:
    lengths = torch.full((blocks.shape[0],), BLOCK, device=values.device)
    lengths[-1] = values.numel() - BLOCK * (blocks.shape[0] - 1)
    means = (ordered_sum(blocks.abs()) / lengths).float()
    return torch.where(not_finite(blocks).any(1), torch.nan, means)


def _to_integers(largest: int, zero: int) -> Callable[[Tensor, Tensor], Tensor]:
    def to_codes(grid: Tensor, bits: Tensor) -> Tensor:
        rounded = torch.floor(grid + uniform(bits)).nan_to_num(0.0).clamp(-largest, largest)
        return as_bytes((rounded + zero).to(torch.int8))

    return to_codes


def _to_e4m3(grid: Tensor, bits: Tensor) -> Tensor:
    """Return one of the two numbers of e4m3 next to each element, in integer arithmetic.

    e4m3 has 20 bits less of mantissa than fp32: random bits are added to those, and carry at random. Below
    the smallest normal number, 2^-6, numbers are multiples of 2^-9.
    """
    magnitude = grid.abs()
    normal = ((magnitude.view(torch.int32).long() + (bits >> 12)) >> 20) - (120 << 3)
    subnormal = torch.floor(magnitude * 2.0**9 + uniform(bits))
    small = magnitude < 2.0**-6
    code = torch.where(small, torch.where(small, subnormal, 0.0).long(), normal).clamp(0, 0x7E)
    return (code | (torch.signbit(grid).long() << 7)).to(torch.uint8)


def _packed(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    grouped = pad(codes, (0, -codes.numel() % (8 // bits))).view(-1, 8 // bits).int()
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    return (grouped << shifts).sum(1).to(torch.uint8)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed.clone()
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=packed.device)
    return ((packed[:, None].int() >> shifts) & ((1 << bits) - 1)).to(torch.uint8).view(-1)


_BITS = {"int8": 8, "int4": 4, "fp8": 8, "sign": 1}
_ZERO = {"int8": 0, "int4": 8, "fp8": 0}
_FORMATS: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
    "int8": (127.0, _to_integers(127, 0)),
    "int4": (7.0, _to_integers(7, 8)),
    "fp8": (448.0, _to_e4m3),
}
