"""Codecs with torch's operators: for devices other than CPUs, and where the native core was not built.

Random bits without a state: a hash of a seed and of the index of an element.

csrc/codecs/random_bits.h computes the same numbers. Two keys of 32 bits are made from the seed with the
mixing function of SplitMix64 (Steele et al., OOPSLA 2014). An index is multiplied by 2^32 / golden ratio, and
mixed with both keys by the multipliers of Chris Wellons' lowbias32 (nullprogram.com/blog/2018/07/31). Only
the upper bits are used.

Kinds that send every element in fewer bits, with torch's operators: int8, int4, fp8, sign.

A payload is a scale in fp32 for each block of 1,024 elements, then the elements: int8 and fp8 a byte each,
int4 two a byte (the first in the lower half, q + 8), sign eight a byte (the first in the lowest bit; 1 is
negative). Where a block has an element that is not finite, its scale is NaN, and every element of it is
decoded to NaN.

int8, int4 and fp8 round up or down at random, the nearer the likelier, so that the mean of a decoded element
is the element; the largest magnitude of a block is the largest number of the format. A scale is at most the
one with which that number is finite. sign has the mean magnitude of the block (Seide et al., Interspeech
2014). csrc/codecs/quantised.h does the same arithmetic.

The kind that sends one element of every N, at positions that all ranks compute alike: random, with torch.

A payload is the fp32 values alone, one of each stretch of N elements; the last stretch may be shorter. The
position in a stretch of n elements is n * hash(seed, stretch) / 2^32. A stretch with an element that is not
finite sends NaN. csrc/codecs/sampled.h does the same arithmetic.

Kinds that send the elements of each chunk that are largest, with torch's operators: topk and threshold.

A payload is chunk after chunk of 4,096 elements, the last one shorter:

    topk:N         positions of the kept elements, ascending, 12 bits each (two in three bytes, the first
                   in the lowest bits), then their values in fp32
    topk:N:2bit    positions, then 2 bits for each (bit 0: negative; bit 1: larger than the mean magnitude
                   of the kept values; the first in the lowest bits), then two magnitudes in bf16, both
                   finite: the mean of the smaller ones, and of the larger ones
    threshold:N    how many are kept in 16 bits, positions, values in fp32

Of equal magnitudes topk keeps the one with the lower position. An element that is not finite counts as the
largest, and its value is sent as NaN. csrc/codecs/sparse.h does the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.spec.plan import BLOCK, CHUNK, Compression

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


_Count = TypeVar("_Count", int, Tensor)


def encode_topk(compression: Compression, values: Tensor, payload: Tensor) -> int:
    """Write the payload of a vector; return its bytes."""
    offset = 0
    for part in _even_parts(values):
        content = _topk_chunks(compression, part).view(-1)
        payload[offset : offset + content.numel()] = content
        offset += content.numel()
    return offset


def decode_topk(compression: Compression, payload: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the kept elements in the vector, and their values."""
    indices, values, offset, first = [], [], 0, 0
    for part in _even_parts(torch.empty(elements, device="meta")):
        chunks, length = part.shape
        kept = compression.kept(length)
        size = compression.payload(length)
        content = payload[offset : offset + chunks * size].view(chunks, size)
        position_bytes = _position_bytes(kept)
        positions = _unpacked_positions(content[:, :position_bytes], kept)
        begins = first + length * torch.arange(chunks, device=payload.device)
        indices.append((positions + begins[:, None]).view(-1))
        values.append(_topk_values(compression, content[:, position_bytes:], kept).view(-1))
        offset += chunks * size
        first += chunks * length
    if not indices:
        return torch.empty(0, dtype=torch.int64, device=payload.device), payload.new_empty(0).float()
    return torch.cat(indices), torch.cat(values)


def most_threshold_bytes(elements: int) -> int:
    """Return the bytes of a threshold's payload in which every element is kept."""
    whole, rest = divmod(elements, CHUNK)
    return whole * (2 + _position_bytes(CHUNK) + 4 * CHUNK) + (2 + _position_bytes(rest) + 4 * rest) * (
        rest > 0
    )


def encode_threshold(number: int, values: Tensor, payload: Tensor) -> int:
    """Write the payload of a vector; return its bytes."""
    if not values.numel():
        return 0
    chunks = as_rows(values, CHUNK)
    lengths = torch.full((chunks.shape[0],), CHUNK, device=values.device)
    lengths[-1] = values.numel() - CHUNK * (chunks.shape[0] - 1)
    squares = chunks.double()
    limits = ((ordered_sum(squares * squares) / lengths).sqrt() * number).float()
    kept = (chunks.abs() > limits[:, None]) | not_finite(chunks)
    counts = kept.sum(1)
    rows, positions = kept.nonzero(as_tuple=True)
    begins, sizes = _threshold_layout(counts)
    content = torch.zeros(int(sizes.sum()), dtype=torch.int64, device=values.device)
    content[begins] = counts & 0xFF
    content[begins + 1] = counts >> 8
    order = torch.arange(rows.numel(), device=values.device) - (counts.cumsum(0) - counts)[rows]
    # A position's 12 bits begin in the middle of a byte where its place is odd.
    shifted = positions << (4 * (order & 1))
    at = begins[rows] + 2 + order * 12 // 8
    content.index_add_(0, at, shifted & 0xFF)
    content.index_add_(0, at + 1, shifted >> 8)
    sent = chunks[rows, positions]
    sent = as_bytes(torch.where(not_finite(sent), torch.nan, sent)).view(-1, 4)
    at = (begins + 2 + _position_bytes(counts))[rows] + 4 * order
    content[at[:, None] + torch.arange(4, device=values.device)] = sent.long()
    payload[: content.numel()] = content.to(torch.uint8)
    return content.numel()


def decode_threshold(payload: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the kept elements in the vector, and their values.

    Where a chunk's bytes begin follows from the counts of the chunks before it, so the host reads the counts
    first. Then all chunks are decoded at once.
    """
    counts, begins = _threshold_chunks(payload, elements)
    total, device = sum(counts), payload.device
    count, begin = torch.tensor([counts, begins], dtype=torch.int64).to(device)
    chunk = torch.arange(len(counts), device=device).repeat_interleave(count, output_size=total)
    order = torch.arange(total, device=device) - (count.cumsum(0) - count)[chunk]
    # A position's 12 bits begin in the middle of a byte where its place is odd.
    at = begin[chunk] + 2 + order * 12 // 8
    pair = payload[at].long() | payload[at + 1].long() << 8
    positions = (pair >> (4 * (order & 1))) & 0xFFF
    at = (begin + 2 + _position_bytes(count))[chunk] + 4 * order
    values = read(payload[at[:, None] + torch.arange(4, device=device)], torch.float32)
    return CHUNK * chunk + positions, values.view(-1)


def _threshold_chunks(payload: Tensor, elements: int) -> tuple[list[int], list[int]]:
    """Return how many elements each chunk keeps, and where its bytes begin."""
    content = payload.cpu().numpy().tobytes()
    counts, begins, begin = [], [], 0
    for _ in range(0, elements, CHUNK):
        counts.append(content[begin] | content[begin + 1] << 8)
        begins.append(begin)
        begin += 2 + _position_bytes(counts[-1]) + 4 * counts[-1]
    return counts, begins


def _even_parts(values: Tensor) -> list[Tensor]:
    """Return the whole chunks, [chunks, 4096], and the last one if it is shorter, [1, rest]."""
    whole = values.numel() // CHUNK * CHUNK
    parts = [values[:whole].view(-1, CHUNK), values[whole:][None]]
    return [part for part in parts if part.numel()]


def _topk_chunks(compression: Compression, chunks: Tensor) -> Tensor:
    """Return the payloads of chunks of one length, [chunks, bytes]."""
    length = chunks.shape[1]
    positions = torch.arange(length, device=chunks.device)
    magnitudes = chunks.contiguous().view(torch.int32).long() & 0x7FFF_FFFF
    # No two keys are equal: of equal magnitudes the first has the largest.
    keys = (magnitudes << 12) | (CHUNK - 1 - positions)
    largest = keys.topk(compression.kept(length), sorted=False).values
    kept = (CHUNK - 1 - (largest & (CHUNK - 1))).sort().values
    values = chunks.gather(1, kept)
    if compression.bits == 2:
        return torch.cat([_packed_positions(kept), _two_bits(values)], 1)
    values = torch.where(not_finite(values), torch.nan, values)
    return torch.cat([_packed_positions(kept), as_bytes(values)], 1)


def _two_bits(values: Tensor) -> Tensor:
    kept = values.shape[1]
    magnitudes = values.abs().double()
    larger = magnitudes > (ordered_sum(magnitudes) / kept)[:, None]
    codes = pad((values < 0).int() + 2 * larger.int(), (0, -kept % 4)).view(values.shape[0], -1, 4)
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=values.device)
    means = torch.stack([_mean(magnitudes, ~larger), _mean(magnitudes, larger)], 1)
    means = means.clamp(max=torch.finfo(torch.bfloat16).max).bfloat16()
    means = torch.where(not_finite(values).any(1)[:, None], torch.nan, means)  # NaN of one bit pattern
    return torch.cat([(codes << shifts).sum(2).to(torch.uint8), as_bytes(means)], 1)


def _mean(magnitudes: Tensor, chosen: Tensor) -> Tensor:
    return (ordered_sum(torch.where(chosen, magnitudes, 0.0)) / chosen.sum(1).clamp(min=1)).float()


def _topk_values(compression: Compression, content: Tensor, kept: int) -> Tensor:
    """Return [chunks, kept] values from what follows the positions."""
    if compression.bits == 32:
        return read(content, torch.float32)
    code_bytes = -(-kept * 2 // 8)
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=content.device)
    codes = (content[:, :code_bytes, None].int() >> shifts).view(content.shape[0], -1)[:, :kept]
    means = read(content[:, code_bytes:], torch.bfloat16).float()
    magnitudes = torch.where(codes & 2 != 0, means[:, 1:], means[:, :1])
    return torch.where(codes & 1 != 0, -magnitudes, magnitudes)


def _position_bytes(kept: _Count) -> _Count:
    return -(-kept * 12 // 8)


def _packed_positions(positions: Tensor) -> Tensor:
    """Return [rows, bytes]: two positions in three bytes."""
    rows, kept = positions.shape
    pairs = pad(positions, (0, kept % 2)).view(rows, -1, 2)
    joined = pairs[:, :, 0] | (pairs[:, :, 1] << 12)
    shifts = torch.arange(0, 24, 8, device=positions.device)
    content = ((joined[:, :, None] >> shifts) & 0xFF).to(torch.uint8)
    return content.view(rows, -1)[:, : _position_bytes(kept)]


def _unpacked_positions(content: Tensor, kept: int) -> Tensor:
    """Return [rows, kept] positions."""
    triples = pad(content, (0, -content.shape[1] % 3)).view(content.shape[0], -1, 3).long()
    joined = triples[:, :, 0] | (triples[:, :, 1] << 8) | (triples[:, :, 2] << 16)
    return torch.stack([joined & 0xFFF, joined >> 12], 2).view(content.shape[0], -1)[:, :kept]


def _threshold_layout(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each chunk's bytes begin, and how many they are."""
    sizes = 2 + _position_bytes(counts) + 4 * counts
    return sizes.cumsum(0) - sizes, sizes


def encode(
    compression: Compression, values: Tensor, payload: Tensor, seed: int, residual: Tensor | None
) -> int:
    """Write the payload of `values`, and into `residual` what it lacks; return the payload's bytes."""
    kind, number = compression.kind, compression.number
    if compression.is_quantised:
        written = encode_quantised(kind, values, payload, seed)
    elif kind == "topk":
        written = encode_topk(compression, values, payload)
    elif kind == "threshold":
        written = encode_threshold(number, values, payload)
    else:
        written = encode_sampled(number, values, payload, seed)
    if residual is None:
        return written
    if compression.is_quantised:
        residual.copy_(values - decode_quantised(kind, payload, values.numel()))
    else:
        indices, sent = _kept(compression, payload[:written], values.numel(), seed)
        rest = values[indices] - sent
        if residual.data_ptr() != values.data_ptr():
            residual.copy_(values)
        residual[indices] = rest
    return written


def decode(compression: Compression, payload: Tensor, out: Tensor, seed: int) -> None:
    """Write the decoded elements to `out`."""
    if compression.is_quantised:
        out.copy_(decode_quantised(compression.kind, payload, out.numel()))
    else:
        indices, values = _kept(compression, payload, out.numel(), seed)
        out.zero_()
        out[indices] = values


def add_decoded(compression: Compression, payload: Tensor, out: Tensor, factor: float, seed: int) -> None:
    """Add the decoded elements times `factor` to `out`."""
    # The product is rounded before it is added: `alpha` would round once on some devices.
    if compression.is_quantised:
        out += decode_quantised(compression.kind, payload, out.numel()) * factor
    else:
        indices, values = _kept(compression, payload, out.numel(), seed)
        out[indices] += values * factor


def _kept(compression: Compression, payload: Tensor, elements: int, seed: int) -> tuple[Tensor, Tensor]:
    if compression.kind == "topk":
        return decode_topk(compression, payload, elements)
    if compression.kind == "threshold":
        return decode_threshold(payload, elements)
    return decode_sampled(compression.number, payload, elements, seed)
