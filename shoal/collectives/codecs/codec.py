"""A Codec: encodes fp32 vectors into payloads of bytes, and decodes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.collectives.codecs import native, with_torch
from shoal.collectives.codecs.with_torch import most_threshold_bytes
from shoal.collectives.ctypes_core import Core, load_core
from shoal.errors import PlanError
from shoal.spec.plan import Compression


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes and decodes as a Compression says; it has no state, and threads may share it.

    Vectors are contiguous fp32 tensors of one dim, payloads contiguous uint8 tensors of one dim that may be
    longer than what is written; all tensors of a call are on one device. An element that is infinite or NaN
    makes the decoded block (chunk, or stretch) have a NaN.
    """

    compression: Compression

    def payload(self, elements: int) -> int:
        """Return the bytes of a payload of `elements`; for threshold, the most bytes that one takes."""
        if self.compression.kind == "threshold":
            return most_threshold_bytes(elements)
        return self.compression.payload(elements)

    def encode(self, values: Tensor, payload: Tensor, *, seed: int, residual: Tensor | None = None) -> int:
        """Write the payload of a vector, and return its bytes.

        Args:
            values: [elements].
            payload: [at least `payload(elements)`].
            seed: What chooses between two ways to round, and the positions of random; any integer.
            residual: [elements], or None; gets `values - decoded`. It may be `values` itself.
        """
        self._require(values, payload)
        assert residual is None or (_is_vector(residual) and residual.shape == values.shape)
        if (core := _core_for(values)) is not None:
            return native.encode(core, self.compression, values, payload, seed, residual)
        return with_torch.encode(self.compression, values, payload, seed, residual)

    def decode(self, payload: Tensor, out: Tensor, *, seed: int = 0) -> None:
        """Write the decoded vector to `out`, [elements]. random reads the `seed` of `encode`."""
        self._require(out, payload)
        if (core := _core_for(out)) is not None:
            native.decode(core, self.compression, payload, out, seed)
        else:
            with_torch.decode(self.compression, payload, out, seed)

    def decode_add(self, payload: Tensor, out: Tensor, *, factor: float = 1.0, seed: int = 0) -> None:
        """Add `factor` times the decoded vector to `out`, [elements]. random reads the `seed` of `encode`."""
        self._require(out, payload)
        if (core := _core_for(out)) is not None:
            native.add_decoded(core, self.compression, payload, out, factor, seed)
        else:
            with_torch.add_decoded(self.compression, payload, out, factor, seed)

    def _require(self, vector: Tensor, payload: Tensor) -> None:
        assert _is_vector(vector), "a vector is contiguous, in fp32, with one dim"
        assert payload.dtype == torch.uint8, "a payload is of bytes"
        assert payload.is_contiguous()
        assert payload.device == vector.device


def codec_of(compression: Compression) -> Codec:
    """Return the codec of a Compression.

    Raises:
        PlanError: none and powersgd send no payload of their own.
    """
    if compression.kind in ("none", "powersgd"):
        raise PlanError(
            f"compress={compression} has no codec",
            possible="int8, int4, fp8, sign, topk:64, topk:64:2bit, random:64, threshold:3",
            change="exchange the vector itself for none, and its factors for powersgd",
        )
    return Codec(compression)


def _is_vector(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.dim() == 1 and tensor.is_contiguous()


def _core_for(vector: Tensor) -> Core | None:
    return load_core() if vector.device.type == "cpu" else None
