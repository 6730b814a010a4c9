"""Sums of parts over an axis, one part for each rank, whose ranks send each other less than the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shoal.collectives import codec_of
from shoal.parallel.communication import Axis, Pending, Then, new_buffer
from shoal.parallel.exchange.memory import ErrorMemory
from shoal.parallel.exchange.sums import seed_of
from shoal.plan import Compression


class CompressedScatter:
    """A reduce-scatter, compressed, with this rank's error memory.

    Args:
        axis: The ranks.
        compression: What is sent; not powersgd.
        feedback: Share of what was left out of one exchange that is added to the next.
    """

    def __init__(self, axis: Axis, compression: Compression, feedback: float) -> None:
        self._axis = axis
        self._codec = codec_of(compression)
        self._has_fixed_size = compression.has_fixed_size
        self._chooses_alike = compression.kind == "random"  # by the seed of the part, on all ranks
        self.memory = ErrorMemory(feedback)

    def kept(self) -> dict[str, torch.Tensor]:
        """See `CompressedSum.kept`."""
        return {} if self.memory.left is None else {"error": self.memory.left}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """See `CompressedSum.restore`."""
        self.memory.left = kept.get("error")

    def start(self, parts: torch.Tensor, name: str, number: int) -> Pending:
        """Begin to sum; once waited for, this rank's part has its sum, and the others are undefined.

        Args:
            parts: `[size x n]`, fp32, contiguous.
            name: Name of the collectives in the Timeline.
            number: Another number for each exchange, equal on all ranks.
        """
        size, index, codec = self._axis.size, self._axis.index, self._codec
        part = len(parts) // size
        capacity = codec.payload(part)
        sent = new_buffer(size * capacity, dtype=torch.uint8, device=parts.device)
        seed = number * size if self._chooses_alike else seed_of(number, index)
        self.memory.add_to(parts)
        written = self.memory.encode(codec, parts, part, sent.chunk(size), seed=seed)
        rows = [capacity] * size
        if not self._has_fixed_size:
            rows = self._rows(written, parts.device, name)
            sent = torch.cat([each[:bytes] for each, bytes in zip(sent.chunk(size), written, strict=True)])
        received = new_buffer(sum(rows), dtype=torch.uint8, device=parts.device)

        def finish() -> None:
            own = parts.chunk(size)[index].zero_()
            for payload in received.split(rows):
                codec.decode_add(payload, own, seed=seed + index)

        return Then(
            self._axis.all_to_all(received, sent, name, received_rows=rows, sent_rows=written), finish
        )

    def _rows(self, written: Sequence[int], device: torch.device, name: str) -> list[int]:
        """Return the bytes that come from each rank, out of those that go to each."""
        sent = torch.tensor(written, dtype=torch.int64, device=device)
        received = torch.empty_like(sent)
        self._axis.all_to_all(received, sent, f"{name} sizes").wait()
        rows: list[int] = received.tolist()
        return rows
