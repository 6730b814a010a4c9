"""Error feedback: what compression left out of an exchange is added to the next one.

Without it top-k never sends what is small but constant, and sign never converges; with it the sum of all that
was sent follows the sum of all that was to be sent (Stich et al., arXiv:1809.07599; Karimireddy et al.,
arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.collectives import Codec


class ErrorMemory:
    """What was left out of the exchanges of one vector on this rank.

    Args:
        feedback: Share of it that is added to the next vector; 0 keeps nothing.

    Attributes:
        left: `[elements]`, fp32; None before the first exchange.
    """

    def __init__(self, feedback: float) -> None:
        self._feedback = feedback
        self.left: torch.Tensor | None = None

    def add_to(self, vector: torch.Tensor) -> None:
        """Add to a vector `[elements]` what was left out before."""
        if self.left is not None:
            vector.add_(self.left, alpha=self._feedback)

    def encode(
        self, codec: Codec, vector: torch.Tensor, part: int, payloads: Sequence[torch.Tensor], *, seed: int
    ) -> list[int]:
        """Write what is sent of a vector, to which `add_to` was applied, and keep the rest.

        Args:
            codec: Writes payloads.
            vector: `[elements]`, fp32.
            part: Elements of a part: each is written by itself.
            payloads: For each part, the memory to write to.
            seed: Another number for each exchange and rank.

        Returns:
            For each part, the bytes written.
        """
        rest = torch.empty_like(vector) if self._feedback else None
        written = []
        for number, payload in enumerate(payloads):
            window = slice(min(number * part, len(vector)), min((number + 1) * part, len(vector)))
            left = None if rest is None else rest[window]
            written.append(codec.encode(vector[window], payload, seed=seed + number, residual=left))
        if rest is not None:
            self.keep(rest, vector)
        return written

    def keep(self, rest: torch.Tensor, vector: torch.Tensor) -> None:
        """Keep what was left out of a vector.

        If the vector has NaN or infinity its step is skipped, and what was left out before stays.
        """
        if not self._feedback:
            return
        if self.left is None:
            self.left = torch.zeros_like(vector)
        # In fp32 the sum of large numbers may overflow.
        if vector.device.type != "cpu":  # the host does not wait for the device
            is_finite = vector.sum(dtype=torch.float64).isfinite()
            self.left = torch.where(is_finite, rest, self.left)
        elif vector.sum().isfinite() or vector.isfinite().all():
            self.left = rest
