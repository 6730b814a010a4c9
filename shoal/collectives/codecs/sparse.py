"""Kinds that send the elements of each chunk that are largest, with torch's operators: topk and threshold.

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

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.collectives.codecs.rows import as_bytes, as_rows, not_finite, ordered_sum, read
from shoal.plan import CHUNK, Compression

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
