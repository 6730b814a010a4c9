"""Joins the rows of several samples into one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.packed import Packed


def joined(
    sources: NDArray[np.int64], batch: Callable[[int, NDArray[np.int64]], tuple[Any, Tensor]]
) -> tuple[Any, Tensor]:
    """Return inputs and targets of a batch whose rows come from several sources.

    Args:
        sources: The source of each row, `[batch]`.
        batch: Function that returns the inputs and targets of some rows, all of one source, from the source
            and the places of these rows in the batch.
    """
    places = [(int(source), np.flatnonzero(sources == source)) for source in np.unique(sources)]
    inputs, targets = zip(*(batch(source, rows) for source, rows in places), strict=True)
    back = torch.from_numpy(np.concatenate([rows for _, rows in places]).argsort())
    return _rows(inputs, back), torch.cat(targets)[back]


def _rows(parts: Sequence[Any], back: Tensor) -> Any:
    """Return the rows of all inputs as one, in their places."""
    first = parts[0]
    if isinstance(first, Packed):
        return Packed(*(_rows(each, back) for each in zip(*parts, strict=True)))
    if isinstance(first, dict):
        return {name: _rows([part[name] for part in parts], back) for name in first}
    return torch.cat(list(parts))[back]
