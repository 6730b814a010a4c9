"""A function for workers, in a file of its own: a worker imports it, and does not have all of shoal.data."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from shoal.errors import DataError


def double(value: int) -> int:
    if value == 13:
        raise DataError("13 was given", possible="another number", change="give it")
    if value < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * value


def make() -> Callable[[int], int]:
    print("a library prints this, which must not be taken for an answer")
    return double
