"""The positions of a sequence that a rank of the context axis holds.

Ulysses needs contiguous parts. In a ring these would give the last rank most of the work, since a position
attends only to those before it. So a ring cuts the sequence into twice as many chunks as ranks, and rank i
holds chunk i from the beginning and chunk i from the end ("zigzag": Llama 3, arXiv:2407.21783, section
3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shoal.errors import PlanError
from shoal.models.task import children_of, map_children, refuse_hidden, tensors_in
from shoal.parallel.axes import Axes
from shoal.parallel.communication import Axis

Batch = TypeVar("Batch")


class Positions(Protocol):
    """A way to cut a sequence."""

    def __call__(self, seq: int, size: int, index: int, device: torch.device | None = None) -> Tensor:
        """Return the positions that a rank holds, in the order in which it holds them.

        Args:
            seq: Length of the whole sequence.
            size: Number of ranks that it is cut over.
            index: Index of the rank.
            device: Device of the result.

        Returns:
            `[seq / size]`, int64.

        Raises:
            PlanError: The sequence cannot be cut into equal parts.
        """
        ...


def contiguous_positions(seq: int, size: int, index: int, device: torch.device | None = None) -> Tensor:
    """Return part `index` of equal, contiguous parts; see `Positions`."""
    _require_divisible(seq, size, 1)
    part = seq // size
    return torch.arange(index * part, (index + 1) * part, device=device)


def zigzag_positions(seq: int, size: int, index: int, device: torch.device | None = None) -> Tensor:
    """Return chunk `index` from the beginning, then chunk `index` from the end; see `Positions`."""
    _require_divisible(seq, size, 2)
    chunk = seq // (2 * size)
    within = torch.arange(chunk, device=device)
    return torch.cat((within + index * chunk, within + (2 * size - 1 - index) * chunk))


POSITIONS: Mapping[str, Positions] = {"ring": zigzag_positions, "ulysses": contiguous_positions}
"""The cut of the sequence for each kind of context parallelism, by its name in a Plan."""


def local_sequence(tensor: Tensor, axis: Axis, attention: str, *, dim: int = 1) -> Tensor:
    """Return this rank's part of a tensor that all ranks of the axis have, such as the tokens of a batch.

    Tokens and targets are cut alike, after the targets were shifted by one: a rank's chunks need not be
    neighbours.

    Args:
        tensor: A tensor of any shape with `seq` along `dim`.
        axis: The context axis.
        attention: A name in `POSITIONS`.
        dim: The dim that is cut.

    Returns:
        A copy, `seq / axis.size` along `dim`; the tensor itself if the axis has one rank.

    Raises:
        PlanError: The sequence cannot be cut into equal parts.
    """
    if axis.size == 1:
        return tensor
    positions = POSITIONS[attention](tensor.shape[dim], axis.size, axis.index, tensor.device)
    return tensor.index_select(dim, positions)


def whole_sequence(part: Tensor, axis: Axis, attention: str) -> Tensor:
    """Return the whole `[batch, seq, ...]` of which each rank has a part; all ranks of the axis call it.

    Args:
        part: This rank's part, `[batch, seq / axis.size, ...]`, as `local_sequence` cuts it.
        axis: The context axis.
        attention: A name in `POSITIONS`.
    """
    parts = part.new_empty((axis.size, *part.shape))
    parts[axis.index] = part
    axis.all_gather(parts, "tokens").wait()
    seq = part.shape[1] * axis.size
    held = [POSITIONS[attention](seq, axis.size, index, part.device) for index in range(axis.size)]
    return parts.transpose(0, 1).flatten(1, 2)[:, torch.cat(held).argsort()]


def local_sequences(batch: Batch, axis: Axis, attention: str) -> Batch:
    """Return a batch with this rank's part of each sequence: see `local_sequence`.

    Args:
        batch: A tensor `[batch, seq, ...]`; or tensors in any nesting of dicts, lists, tuples and
            dataclasses, of which those are cut that have as many columns as the tokens (`_length_of`).
            `position_ids` stay whole: a rank's attention has to know the documents of the whole sample.
        axis: The context axis.
        attention: A name in `POSITIONS`.

    Raises:
        PlanError: The sequence cannot be cut into equal parts.
    """
    if axis.size == 1:
        return batch
    length = _length_of(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            is_cut = value.dim() > 1 and value.shape[1] == length
            return local_sequence(value, axis, attention) if is_cut else value
        refuse_hidden(value, "local_sequence")
        whole = (children_of(value) or {}).get("position_ids")
        return map_children(lambda each: each if each is whole else cut(each), value)

    result: Batch = cut(batch)
    return result


def _length_of(batch: Any) -> int | None:
    """Return the length of a batch's sequences: that of `input_ids`; without these that of the first tensor
    that is `[batch, seq]` of integers or `[batch, seq, width]`; without one that of the first with columns.
    """
    columns = [each for each in tensors_in(batch) if each.dim() > 1]
    sequences = [
        each for each in columns if each.dim() == 3 or (each.dim() == 2 and not each.is_floating_point())
    ]
    found = [*_input_ids(batch), *sequences, *columns]
    return found[0].shape[1] if found else None


def _input_ids(value: Any) -> Iterator[Tensor]:
    held = children_of(value) or {}
    ids = held.get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() > 1:
        yield ids
    for each in held.values():
        yield from _input_ids(each)


def require_sequence(seq: int, size: int, attention: str) -> None:
    """Check that sequences of `seq` tokens can be cut over `size` ranks.

    Raises:
        PlanError: They cannot be cut into equal parts.
    """
    if size > 1:
        POSITIONS[attention](seq, size, 0, torch.device("meta"))


def residual_positions(part: int, axes: Axes, attention: str, device: torch.device) -> Tensor:
    """Return the positions, in their samples, of the tokens of this rank's residual stream.

    Args:
        part: Number of a sample's tokens that this rank has between blocks.
        axes: The Plan's axes, of which `sequence` splits the stream.
        attention: A name in `POSITIONS`.
        device: Device of the result.

    Returns:
        `[part]`, int64.
    """
    splits = axes.sequence.size // axes.cp.size  # parts that tp makes of cp's part
    held = POSITIONS[attention](part * axes.sequence.size, axes.cp.size, axes.cp.index, device)
    return held.chunk(splits)[axes.tp.index if splits > 1 else 0]


def _require_divisible(seq: int, size: int, chunks: int) -> None:
    multiple = size * chunks
    if seq % multiple:
        way = "ring attention gives each rank two equal chunks" if chunks == 2 else "all parts are equal"
        above = -(-seq // multiple) * multiple
        another = f", or a cp that divides {seq // chunks}" if seq % chunks == 0 else ""
        raise PlanError(
            f"a sequence of {seq} tokens cannot be cut for cp={size}: {way}",
            possible=f"sequences of a multiple of {multiple} tokens",
            change=f"use sequence={above}{another}",
        )
