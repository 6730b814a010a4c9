"""Random numbers of data: seeded for each sample, without a change to the random numbers of training.

A dataset draws from global generators: torch's, numpy's, Python's. These belong to the process. A thread that
fetched samples would draw from them between two draws of training, at a moment that no seed fixes. No lock
prevents that, because training draws without a lock. So samples that may draw are fetched where nothing else
draws at the same time: in the thread that trains, or in processes of their own. During a fetch the generators
of training are saved, and each sample is made with generators that are seeded by (seed, epoch, index). So a
sample depends on nothing else: not on the ranks, the micro-batch, or how far ahead it was made.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shoal.errors import DataError

_MASK = (1 << 64) - 1
_thread = threading.local()


def key_of(*numbers: int) -> int:
    """Return a 64-bit hash of some numbers."""
    packed = b"".join((number & _MASK).to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def seed_generators(key: int) -> None:
    """Seed the generators that a dataset draws from: torch's on the CPU, numpy's and Python's."""
    torch.default_generator.manual_seed(key)
    np.random.seed(np.array([key & 0xFFFFFFFF, key >> 32], dtype=np.uint32))
    random.seed(key)


@contextmanager
def generators_put_aside() -> Iterator[None]:
    """Save the state of these generators, and restore it after the context."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@contextmanager
def shared_with_training() -> Iterator[None]:
    """Mark this thread, within the context, as one that runs beside training and must not draw."""
    _thread.shared = True
    try:
        yield
    finally:
        _thread.shared = False


def refuse_here(what: str) -> None:
    """Refuse data that may draw random numbers, in a thread beside the one that trains.

    Raises:
        DataError: This thread runs beside the one that trains.
    """
    if getattr(_thread, "shared", False):
        raise DataError(
            f"a {what} is read in a second thread, and may draw from random generators that training uses",
            possible="data that draws no random numbers, or a shoal.data.Feed, which chooses the right "
            "thread",
            change="give deterministic=True if it draws none, or read it with shoal.data.open_feed",
        )
