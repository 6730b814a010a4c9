"""Compares two checkpoints tensor by tensor, whatever numbers of ranks wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint.coordinator import SingleProcess
from shoal.checkpoint.load import load
from shoal.checkpoint.manifest import TensorRecord, read_manifest
from shoal.checkpoint.region import Piece
from shoal.checkpoint.shard import dtype_named

_OF_RANK = "rank/"
_TOGETHER = 1 << 26  # bytes of tensors that are read at once, unless one has more


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs between two checkpoints.

    Attributes:
        name: Its name.
        problem: Why its elements were not compared; "" if they were.
        elements: Its elements.
        differing: Those of them that differ; NaN does not differ from NaN.
        largest: The largest absolute difference; infinite where one is not finite and the other is another.
        magnitude: The largest absolute value of the first one that is finite.
    """

    name: str
    problem: str = ""
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    magnitude: float = 0.0


def compare(first: Path, second: Path) -> Iterator[Difference]:
    """Return the tensors that differ between two checkpoints, in the order of their names.

    What belongs to single ranks, such as random generators, is not compared.

    Args:
        first, second: Directories of checkpoints.

    Raises:
        CorruptCheckpointError: A manifest or a file cannot be read.
    """
    ours, theirs = ({**read_manifest(path).tensors} for path in (first, second))
    pending: list[str] = []
    nbytes = 0
    for name in sorted(name for name in ours.keys() | theirs.keys() if not name.startswith(_OF_RANK)):
        problem = _problem(ours.get(name), theirs.get(name))
        if problem:
            yield Difference(name, problem)
            continue
        pending.append(name)
        nbytes += max(_bytes_of(ours[name]), _bytes_of(theirs[name]))
        if nbytes >= _TOGETHER:
            yield from _compared(first, second, ours, theirs, pending)
            pending, nbytes = [], 0
    yield from _compared(first, second, ours, theirs, pending)


def _problem(ours: TensorRecord | None, theirs: TensorRecord | None) -> str:
    if ours is None or theirs is None:
        return "only in the second" if ours is None else "only in the first"
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} and {list(theirs.shape)}"
    return ""


def _bytes_of(record: TensorRecord) -> int:
    return torch.Size(record.shape).numel() * dtype_named(record.dtype).itemsize


def _compared(
    first: Path,
    second: Path,
    ours: dict[str, TensorRecord],
    theirs: dict[str, TensorRecord],
    names: list[str],
) -> Iterator[Difference]:
    read = []
    for path, records in ((first, ours), (second, theirs)):
        tensors = [torch.empty(records[name].shape, dtype=dtype_named(records[name].dtype)) for name in names]
        pieces = [Piece.whole(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
        load(path, pieces, SingleProcess())
        read.append(tensors)
    for name, one, other in zip(names, *read, strict=True):
        found = _difference(name, one.double(), other.double())
        if found.differing:
            yield found


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> Difference:
    differs = (one != other) & ~(one.isnan() & other.isnan())
    apart = (one[differs] - other[differs]).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    finite = one[one.isfinite()].abs()
    return Difference(
        name,
        elements=one.numel(),
        differing=int(differs.sum()),
        largest=apart.max().item() if apart.numel() else 0.0,
        magnitude=finite.max().item() if finite.numel() else 0.0,
    )
