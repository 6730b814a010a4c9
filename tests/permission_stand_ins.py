"""Tests of permissions, which root does not heed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions count inside this block, also for root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
