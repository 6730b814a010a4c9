"""Ids of .npy and .bin files as one stream, mapped where they are and not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray


@final
class JoinedIds:
    """Arrays of ids, one behind the other, of which only what is asked for is read.

    Args:
        parts: The arrays, `[length]` each.
    """

    def __init__(self, parts: Sequence[NDArray[np.integer]]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, places: slice | NDArray[np.int64]) -> Any:
        """Return a part of the stream, mapped too, or the ids at some places, in an array of their shape."""
        begins = self._ends - [len(part) for part in self._parts]
        if isinstance(places, slice):
            first, last, step = places.indices(len(self))
            assert step == 1, "a stream has no steps"
            cut = [
                part[max(0, first - begin) : max(0, last - begin)]
                for part, begin in zip(self._parts, begins.tolist(), strict=True)
            ]
            return JoinedIds(cut)
        ids = np.empty(places.shape, dtype=np.int64)
        sources = np.searchsorted(self._ends, places, side="right")
        for source in np.unique(sources):
            here = sources == source
            ids[here] = self._parts[source][places[here] - begins[source]]
        return ids
