"""The global sample order: a keyed permutation that is computed, never stored.

A Feistel network permutes the numbers of a whole number of bits: the number is cut into a high and a low
part, and each part in turn is xor-ed with a hash of the other, which can be undone step by step whatever
the hash is (Luby and Rackoff, "How to construct pseudorandom permutations", 1988). To permute `count`
numbers where `count` is not a power of two, cycle walking applies the network again to each result that
is not below `count` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The network has
fewer than twice `count` numbers, so two applications are enough on average.

All arithmetic is on 64-bit unsigned integers written out here, so the order is the same on every machine
and with every version of numpy.

Random numbers of data: seeded for each sample, without a change to the random numbers of training.

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
from numpy.typing import NDArray

from shoal.errors import DataError

_ROUNDS = 12  # 4 are enough for wide halves; with few samples halves have one or two bits, which need over 8
_MAXIMUM_COUNT = 1 << 62

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def order(seed: int, epoch: int, count: int, positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the sample at each position of an epoch.

    For a fixed seed and epoch this is a permutation of `range(count)`. It takes no memory beyond that of
    `positions`.

    Args:
        seed: Any integer; its low 64 bits count.
        epoch: Any integer; its low 64 bits count.
        count: Number of samples in an epoch, from 1 to 2**62.
        positions: Positions within the epoch, `[n]`, each in `range(count)`.

    Returns:
        Sample indices, `[n]`, each in `range(count)`.

    Raises:
        ValueError: `count` or a position is out of range.
    """
    if not 1 <= count <= _MAXIMUM_COUNT:
        raise ValueError(f"count is {count}; it must be from 1 to 2**62")
    if positions.size and not 0 <= positions.min() <= positions.max() < count:
        raise ValueError(f"positions must lie in range({count})")
    bits = (count - 1).bit_length()
    keys = _round_keys(seed, epoch)

    permuted = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(permuted >= np.uint64(count))
    while outside.size:
        permuted[outside] = _feistel(permuted[outside], bits, keys)
        outside = outside[permuted[outside] >= np.uint64(count)]
    return permuted.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """Permute `range(2**bits)`, value by value; the two parts may differ by one bit in width."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << bits // 2) - 1)
    high_mask = np.uint64((1 << bits - bits // 2) - 1)
    low, high = values & low_mask, values >> low_bits
    for high_key, low_key in zip(keys[::2], keys[1::2], strict=True):
        high = high ^ (_mix(low ^ np.uint64(high_key)) & high_mask)
        low = low ^ (_mix(high ^ np.uint64(low_key)) & low_mask)
    return (high << low_bits) | low


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014); numpy arrays wrap modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[int]:
    """Return one key per round, unrelated between any two (seed, epoch) pairs."""
    words = np.array([seed & _MASK], dtype=np.uint64)
    words = _mix(words + np.uint64(_GOLDEN)) ^ np.uint64(epoch & _MASK)
    steps = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return [int(key) for key in _mix(_mix(words + np.uint64(_GOLDEN)) + steps)]


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
