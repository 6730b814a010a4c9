"""A bucket's shard whose parameters, gradients or both are kept in files.

Tensors of parameters and gradients are then mappings of the files, which anybody may read between backward
and update. A step itself moves whole shards: parameters are read for a gather, gradients are written when
they are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

import torch

from shoal.parallel.offload.state_file import Segment, aligned_buffer
from shoal.parallel.offload.storage import Storage


@final
class StoredShard:
    """The place in files of a bucket's shard.

    Args:
        storage: This rank's files.
        elements: Length of the shard's buffer.
        dtype: Type of the parameters.
        trains: Whether the parameters are trained, and have gradients.

    Attributes:
        elements: The argument `elements`.
        parameters: The parameters; None if they stay in memory.
        gradients: The gradients, fp32; None if they stay in memory, or there are none.
    """

    def __init__(self, storage: Storage, elements: int, dtype: torch.dtype, *, trains: bool) -> None:
        self.elements = elements
        self._storage = storage

        def add(part: str, dtype: torch.dtype) -> Segment | None:
            if getattr(storage.tiers, part) == "device":
                return None
            segment = storage.add(part, f"the {part}", elements, dtype)
            assert isinstance(segment, Segment)
            return segment

        self.parameters = add("parameters", dtype)
        self.gradients = add("gradients", torch.float32) if trains else None
        self._staged: torch.Tensor | None = None
        self._reading: Future[None] | None = None

    @property
    def is_reading(self) -> bool:
        """Whether a read was started and not finished."""
        return self._reading is not None

    def start_read(self) -> None:
        """Begin to read the parameters."""
        assert self.parameters is not None
        self._staged = aligned_buffer(self.elements, self.parameters.dtype)
        self._reading = self._storage.start(self.parameters.read, 0, self._staged)

    def finish_read(self) -> torch.Tensor:
        """Return the parameters `[elements]` that were read."""
        assert self._staged is not None
        assert self._reading is not None
        self._storage.wait(self._reading, "read:parameters")
        staged, self._staged, self._reading = self._staged, None, None
        return staged

    def write_gradients(self, values: torch.Tensor) -> None:
        """Begin to write gradients, from a buffer of `aligned_buffer`; `Storage.settle` waits for it."""
        assert self.gradients is not None
        self._storage.write_behind(self.gradients.write, 0, values)


@dataclass(slots=True)
class Stored:
    """The place of an owned parameter's part in a stored shard.

    Attributes:
        shard: The shard.
        offset: The part's first element in the shard's buffer.
        norm: Norm of the gradient that was written last; None if none was.
        written: Where that gradient lies, and the versions of it and of the DTensor around it.
    """

    shard: StoredShard
    offset: int
    norm: torch.Tensor | None = None
    written: tuple[int, int, int] | None = None

    def norm_of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the norm of a parameter's gradient, unless it has changed since it was written."""
        return self.norm if _state_of(gradient) == self.written else None


def note_norms(stored: Sequence[tuple[Stored, torch.Tensor, torch.Tensor]]) -> None:
    """Keep the norms of gradients that are about to be written: place, value in memory, the gradient."""
    norms = torch._foreach_norm([value for _, value, _ in stored]) if stored else ()
    for (place, _, gradient), norm in zip(stored, norms, strict=True):
        place.norm, place.written = norm, _state_of(gradient)


def _state_of(gradient: torch.Tensor) -> tuple[int, int, int]:
    """Return where a gradient lies, and its versions: an operation on a DTensor counts for this alone."""
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return local.data_ptr(), local._version, gradient._version
