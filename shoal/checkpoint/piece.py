"""A piece: the part of one tensor that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.checkpoint.region import Region
from shoal.errors import CheckpointError

__all__ = ["Piece"]


@dataclass(frozen=True, eq=False)
class Piece:
    """The half-open interval [start, stop) of a global tensor, or of a region of it, flattened row by row.

    The region is the part of a tensor that tensor or expert parallelism leaves on this rank. The interval is
    the part of the region that data parallelism leaves: all of it, some rows, or any elements of a flat
    bucket.

    Args:
        name: Name of the global tensor, such as "model/blocks.0.attention.query.weight".
        shape: Shape of the global tensor; `()` for a scalar.
        start: The first element that this rank holds, counted in the region.
        stop: One past the last element that it holds.
        tensor: The `stop - start` elements, contiguous, of any shape and on any device. Saving reads it,
            loading fills it.
        region: The block of the tensor that this rank holds a part of; None: all of the tensor.
        is_constant: Whether training leaves it as it is, so that it is stored apart and mostly written once.

    Raises:
        CheckpointError: The interval or the region is not inside the shape, or `tensor` is not its elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor
    region: Region | None = None
    is_constant: bool = False

    def __post_init__(self) -> None:
        if self.region is not None and not self.region.is_inside(self.shape):
            raise CheckpointError(
                f"region {self.region} of {self.name!r} is not inside its shape {list(self.shape)}"
            )
        size = self.block.elements
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

    @property
    def block(self) -> Region:
        """Return the region; without one, all of the tensor."""
        return Region.whole(self.shape) if self.region is None else self.region

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Piece:
        """Return the piece that is the whole of `tensor`."""
        return cls(name, tuple(tensor.shape), 0, tensor.numel(), tensor)
