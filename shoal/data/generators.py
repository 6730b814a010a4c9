"""What data draws at random: seeded for each sample, without touching what training draws.

A dataset draws from global generators: torch's, numpy's, Python's. These belong to the process, so a thread
that fetched samples would draw from them between two draws of training, at a moment that no seed fixes, and
no lock mends that, because training draws without asking. So samples that may draw are fetched where nothing
else draws meanwhile: in the thread that trains, or in processes of their own. Around a fetch the generators
of training are put aside, and each sample is made with generators that are seeded by (seed, epoch, index).
So a sample depends on nothing else: not on the ranks, the micro-batch, or how far ahead it was made.
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

__all__ = ["generators_put_aside", "key_of", "refuse_here", "seed_generators", "shared_with_training"]

_MASK = (1 << 64) - 1
_thread = threading.local()


def key_of(*numbers: int) -> int:
    """A number of 64 bits that follows from others, and is as good as unrelated between any two of them."""
    packed = b"".join((number & _MASK).to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def seed_generators(key: int) -> None:
    """Seeds the generators that a dataset draws from: torch's of the CPU, numpy's and Python's."""
    torch.default_generator.manual_seed(key)
    np.random.seed(np.array([key & 0xFFFFFFFF, key >> 32], dtype=np.uint32))
    random.seed(key)


@contextmanager
def generators_put_aside() -> Iterator[None]:
    """After it these generators go on from where they were before it."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@contextmanager
def shared_with_training() -> Iterator[None]:
    """Within it, this thread runs beside the one that trains, so that nothing may be drawn in it."""
    _thread.shared = True
    try:
        yield
    finally:
        _thread.shared = False


def refuse_here(what: str) -> None:
    """Refuses data that may draw at random in a thread beside the one that trains.

    Raises:
        DataError: This is such a thread.
    """
    if getattr(_thread, "shared", False):
        raise DataError(
            f"a {what} is read in a thread beside training, and may draw from generators that training uses",
            possible="data that draws nothing, or a shoal.data.Feed, which finds the right place to read it",
            change="give deterministic=True if it draws nothing, else read it with shoal.data.open_feed",
        )
