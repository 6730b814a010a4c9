"""Several tensors in one buffer, each cut into equal parts, one for each rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

__all__ = ["Stripes"]


class Stripes:
    """Where the tensors of a buffer lie, as the native core takes it.

    Args:
        stripes: Of each tensor the byte where it begins and the bytes of one rank's part; rank i's part
            begins i parts behind it. In the order in which they lie; none overlaps the next. All ranks have
            the same.
    """

    def __init__(self, stripes: Sequence[tuple[int, int]]) -> None:
        numbers = [number for stripe in stripes for number in stripe]
        self._numbers = (ctypes.c_uint64 * len(numbers))(*numbers)
        self.address = ctypes.addressof(self._numbers)
        self.count = len(stripes)
