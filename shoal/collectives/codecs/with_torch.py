"""Codecs with torch's operators: for devices other than CPUs, and where the native core was not built."""

from __future__ import annotations

from torch import Tensor

from shoal.collectives.codecs.quantised import decode_quantised, encode_quantised
from shoal.collectives.codecs.sampled import decode_sampled, encode_sampled
from shoal.collectives.codecs.sparse import decode_threshold, decode_topk, encode_threshold, encode_topk
from shoal.plan import Compression


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
