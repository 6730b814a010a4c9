"""What a rank pushes to parameter servers: its vector whole, or encoded, with what was left out before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from shoal.collectives import Codec
from shoal.parallel.exchange.memory import ErrorMemory


@final
class Pushes:
    """Make the parts of a vector that servers get.

    What encoding leaves out of a push stays with this rank, and is added to its next one.

    Args:
        codec: Encodes the parts; None to send the vector itself.
        feedback: Share of what was left out of one push that is added to the next.
    """

    def __init__(self, codec: Codec | None, feedback: float) -> None:
        self._codec = codec
        self._memory = ErrorMemory(feedback)
        self._contents: list[torch.Tensor] = []

    def forget(self) -> None:
        """Forget what was left out: the values that it would have changed are gone."""
        self._memory.left = None

    def parts(self, vector: torch.Tensor, windows: Sequence[slice], seed: int) -> list[torch.Tensor]:
        """Return what each server gets; valid until the next call.

        Args:
            vector: `[elements]`, fp32; what was left out before is added to it.
            windows: The elements of each server.
            seed: Seed of the first part; the others have the next ones.
        """
        if self._codec is None:
            return [vector[window] for window in windows]
        if not self._contents:
            sizes = [self._codec.payload(window.stop - window.start) for window in windows]
            self._contents = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._memory.add_to(vector)
        part = windows[0].stop
        written = self._memory.encode(self._codec, vector, part, self._contents, seed=seed)
        return [content[:bytes] for content, bytes in zip(self._contents, written, strict=True)]
