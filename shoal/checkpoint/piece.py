"""A piece: what one rank holds of one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shoal.errors import CheckpointError

__all__ = ["Piece"]


@dataclass(frozen=True, eq=False)
class Piece:
    """The half-open interval [start, stop) of a global tensor, flattened in row-major order.

    Intervals, rather than blocks, say the same of every way in which data parallelism cuts a tensor: whole,
    by rows, or at any byte of a flat bucket.

    Args:
        name: The global tensor, such as "model/blocks.0.attention.query.weight".
        shape: The global tensor's shape; `()` for a scalar.
        start: The first element that this rank holds.
        stop: One past the last element that it holds.
        tensor: The `stop - start` elements, contiguous, of any shape and on any device. Saving reads it,
            loading fills it.

    Raises:
        CheckpointError: The interval is not inside the shape, or `tensor` is not its elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        if not 0 <= self.start <= self.stop <= size:
            raise CheckpointError(
                f"piece [{self.start}, {self.stop}) of {self.name!r} is not inside its {size} elements"
            )
        if self.tensor.numel() != self.stop - self.start:
            raise CheckpointError(
                f"piece [{self.start}, {self.stop}) of {self.name!r} "
                f"comes with a tensor of {self.tensor.numel()} elements"
            )
        if not self.tensor.is_contiguous():
            raise CheckpointError(f"the tensor of a piece of {self.name!r} is not contiguous")

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Piece:
        """The piece that is the whole of `tensor`."""
        return cls(name, tuple(tensor.shape), 0, tensor.numel(), tensor)
