"""Where each text of a stream begins and ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError


def text_bounds(tokens: NDArray[np.integer], first_end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each text begins, and where its end stands, `[texts]` each.

    Args:
        tokens: A stream of texts, `[length]`, each with an id of `first_end` or more at its end.
        first_end: The first id that ends a text.

    Raises:
        DataError: There is no text.
    """
    ends = np.flatnonzero(tokens >= first_end)
    if not len(ends):
        raise DataError(
            "a part of the data, train or validation, has no row",
            possible="at least one row in each",
            change="give more data, a larger data.validation_fraction, or a file in data.validation",
        )
    return np.concatenate(([0], ends[:-1] + 1)), ends
