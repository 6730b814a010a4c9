"""The settings of a bench: names and sizes from the command line, checked before any process starts.

The ranks of a bench: how they join, and how they exchange figures between measurements.

They join a default group of gloo, which every torch has. It carries nothing that is measured: it starts the
ranks of a measurement together and finds the slowest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.collectives.tcp_store import open_store
from shoal.errors import ConfigError, nearest
from shoal.machine.bench.collective import COLLECTIVES
from shoal.predict.cost import ALGORITHMS
from shoal.units import format_bytes, parse_bytes

BACKENDS = ("shoal", "shoal-shared", "gloo", "nccl", "mpi", "oneccl", "memory")
"""Names of contestants; `contestants/` explains each."""

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")

OPERATORS = ("sum", "avg", "min", "max", "product")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        collectives: Names of collectives, in order.
        backends: Names of contestants, in order; ratios are to the first.
        sizes: Sizes in bytes, in order.
        dtype: Name of the element type.
        op: Name of the operator of collectives that reduce.
        rounds: Turns of each backend at each size.
        algorithm: Algorithm that the backend `shoal` must use for collectives that have it; None lets it
            choose.
        apart: Bytes between two uses of a buffer, so that caches do not have it; 0 uses one buffer always.
        fresh: Whether to measure every size once more, with new tensors for each operation.

    Raises:
        ConfigError: A name does not exist, a number is too small, or no contestant uses the algorithm.
    """

    collectives: tuple[str, ...]
    backends: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    rounds: int = 5
    algorithm: str | None = None
    apart: int = 0
    fresh: bool = False

    def __post_init__(self) -> None:
        for option, names, known in (
            ("--collective", self.collectives, tuple(COLLECTIVES)),
            ("--backend", self.backends, BACKENDS),
            ("--dtype", (self.dtype,), DTYPES),
            ("--op", (self.op,), OPERATORS),
        ):
            if not names:
                raise ConfigError(
                    f"{option} is empty",
                    possible=", ".join(known),
                    change=f"give one of these to {option}",
                )
            for name in names:
                _require_known(option, name, known)
        if self.op == "avg" and not self.dtype.startswith(("float", "bfloat")):
            raise ConfigError(
                f"--op avg of {self.dtype}: backends refuse averages of integers, or round them differently",
                possible="avg of floating-point types",
                change="give another --op or --dtype",
            )
        if self.rounds < 1:
            raise ConfigError(
                f"--rounds {self.rounds} measures nothing",
                possible="1 or more; 5 or more for a meaningful range",
                change="give a larger --rounds",
            )
        if self.algorithm is not None:
            self._require_use_of_algorithm()

    @property
    def algorithms(self) -> dict[str, str]:
        """Return the algorithm for each collective that has it."""
        having = {collective for collective, name, _ in ALGORITHMS if name == self.algorithm}
        return {name: self.algorithm for name in self.collectives if self.algorithm and name in having}

    def _require_use_of_algorithm(self) -> None:
        if not any(name.startswith("shoal") for name in self.backends):
            raise ConfigError(
                f"--algorithm {self.algorithm} is for the backend shoal, which is not measured",
                possible="algorithms of the backend shoal",
                change="add shoal to --backend, or leave out --algorithm",
            )
        if not self.algorithms:
            names = [name for collective, name, _ in ALGORITHMS if collective in self.collectives]
            _require_known("--algorithm", str(self.algorithm), tuple(dict.fromkeys(names)))


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names between commas, each once.

    >>> parse_names("all_reduce, broadcast,all_reduce")
    ('all_reduce', 'broadcast')
    """
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return sizes in bytes from a list or a range.

    A range `FIRST:LAST[:xFACTOR]` multiplies by the factor, 2 by default, from the first size up to the last.

    >>> parse_sizes("64KiB,1KiB"), parse_sizes("1KiB:20KiB:x4")
    ((65536, 1024), (1024, 4096, 16384))

    Raises:
        ConfigError: The text is neither a list nor a range.
    """
    if ":" not in text:
        return tuple(dict.fromkeys(_size(part, text) for part in text.split(",")))
    first_text, last_text, *rest = text.split(":")
    first, last = _size(first_text, text), _size(last_text, text)
    if len(rest) > 1 or first > last:
        raise _not_sizes(text, f"{format_bytes(first)} comes after {format_bytes(last)}" if not rest else "")
    factor = _factor(rest[0] if rest else "x2", text)
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def _size(part: str, text: str) -> int:
    try:
        size = parse_bytes(part)
    except ValueError:
        raise _not_sizes(text, f"{part!r} is not a size{_hint(part)}") from None
    if size == 0:
        raise _not_sizes(text, "0 bytes take no time worth measuring")
    return size


def _hint(part: str) -> str:
    """Suggest a binary size for one with another unit: 1KiB for 1KB or 1k."""
    match = re.fullmatch(r"(\d+)\s*([KMGT])i?B?", part.strip(), re.IGNORECASE)
    return f" (did you mean '{match[1]}{match[2].upper()}iB'?)" if match else ""


def _factor(part: str, text: str) -> int:
    if not part.startswith("x") or not part[1:].isdecimal() or int(part[1:]) < 2:
        raise _not_sizes(text, f"{part!r} is not a factor")
    return int(part[1:])


def _not_sizes(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--sizes {text} cannot be read{': ' if reason else ''}{reason}",
        possible="a list such as 1KiB,64KiB,1MiB or a range such as 1KiB:128MiB or 1KiB:128MiB:x4",
        change="write the sizes like one of these",
    )


def _require_known(option: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(
            f"{option} {name} does not exist{nearest(name, known)}",
            possible=", ".join(known),
            change=f"give one of these to {option}",
        )


_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank and the number of ranks.

    Attributes:
        rank: This process's rank.
        count: Number of ranks.
        local_rank: This process's number on its host.
    """

    rank: int
    count: int
    local_rank: int

    def start_together(self) -> None:
        """Wait until all ranks are here; they return within about a millisecond of one another."""
        dist.barrier()

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        return _combined(value, dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        """Return the sum of the ranks' values."""
        return _combined(value, dist.ReduceOp.SUM)


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Form the default group of all ranks for this context; they meet at MASTER_ADDR and MASTER_PORT."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = open_store(master, ranks.rank, ranks.count, _TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.count, timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _combined(value: float, op: dist.ReduceOp.RedOpType) -> float:
    combined = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(combined, op)
    return combined.item()
