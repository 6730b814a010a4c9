"""Codecs with the native core, for vectors in the memory of CPUs (csrc/codecs/codec.h)."""

from __future__ import annotations

from torch import Tensor

from shoal.collectives.ctypes_core import Core
from shoal.spec.plan import Compression

KINDS = ("int8", "int4", "fp8", "sign", "topk", "topk:2bit", "threshold", "random")
"""The kinds of csrc/codecs/codec.h, in the order of their numbers."""


def encode(
    core: Core, compression: Compression, values: Tensor, payload: Tensor, seed: int, residual: Tensor | None
) -> int:
    """Write the payload of `values`, and into `residual` what it lacks; return the payload's bytes.

    Raises:
        CollectiveError: The payload has too few bytes.
    """
    written = core.encode(
        *_codec(compression, seed),
        values.data_ptr(),
        values.numel(),
        payload.data_ptr(),
        payload.numel(),
        None if residual is None else residual.data_ptr(),
    )
    return core.check(written, f"encoding with compress={compression}")


def decode(core: Core, compression: Compression, payload: Tensor, out: Tensor, seed: int) -> None:
    """Write the decoded elements to `out`.

    Raises:
        CollectiveError: It is not the payload of such a vector.
    """
    done = core.decode(
        *_codec(compression, seed), payload.data_ptr(), payload.numel(), out.data_ptr(), out.numel()
    )
    core.check(done, f"decoding with compress={compression}")


def add_decoded(
    core: Core, compression: Compression, payload: Tensor, out: Tensor, factor: float, seed: int
) -> None:
    """Add the decoded elements times `factor` to `out`.

    Raises:
        CollectiveError: It is not the payload of such a vector.
    """
    done = core.decode_add(
        *_codec(compression, seed), payload.data_ptr(), payload.numel(), out.data_ptr(), out.numel(), factor
    )
    core.check(done, f"decoding with compress={compression}")


def _codec(compression: Compression, seed: int) -> tuple[int, int, int]:
    kind = "topk:2bit" if compression.bits == 2 else compression.kind
    return KINDS.index(kind), compression.number, seed & 0xFFFF_FFFF_FFFF_FFFF
