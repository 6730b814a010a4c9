"""A rank's parts of the model's parameters: the trained ones (Owned) and the others (Frozen).

The place of parameters in a bucket's buffer, and the shard to which each of their rows belongs.

A bucket is one flat buffer that holds several parameters one after another, each contiguous. A parameter is
cut along its first dim: with n shards, shard i has the i-th of n equal parts of its rows, as `torch.chunk`
and DTensor's `Shard(0)` cut them, so that the last shards may have fewer rows or none. In the buffer every
parameter has space for n full parts: a stripe, which collectives move as one (`shoal.collectives.Stripes`).
Each parameter starts at a multiple of `ALIGNMENT` elements, so that it is as well aligned as a separate
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from shoal.errors import LayoutError
from shoal.parallel.axes import Family
from shoal.parallel.communication import Axis
from shoal.parallel.offload.storage import Stored

ALIGNMENT = 16
"""Alignment in elements: 64 bytes in fp32, a cache line."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The block of a parameter that a rank of tensor or expert parallelism has.

    Attributes:
        shape: The whole parameter's shape.
        dim: The dim that is cut.
        offset: The block's first index along it.
        length: The block's length along it.
    """

    shape: tuple[int, ...]
    dim: int
    offset: int
    length: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Return the block's shape."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the block of a whole parameter, as a view."""
        return whole.narrow(self.dim, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of a parameter in a flat buffer.

    Attributes:
        start: First element of the rows.
        stop: End of the rows: one past their last element.
        sizes: Sizes of the dims, in memory order.
        back: The permutation to the parameter's order of dims, if memory order differs; otherwise None.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]
    back: tuple[int, ...] | None

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the rows `[rows, ...]` of a buffer, as a view."""
        rows = buffer[self.start : self.stop].view(self.sizes)
        return rows if self.back is None else rows.permute(self.back)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its bucket.

    Attributes:
        name: The parameter's name in the model.
        shape: The parameter's shape.
        order: The parameter's dims from the outermost in memory to the innermost; the first dim comes first.
        shards: Number of shards.
        offset: The parameter's first element in the bucket's buffer.
        packed: First element of a shard's part in a buffer where the parts of one shard lie one after
            another.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    shards: int
    offset: int
    packed: int

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def row_elements(self) -> int:
        """Number of elements of a row: of one index of the first dim."""
        return math.prod(self.shape[1:])

    @property
    def part_elements(self) -> int:
        """Number of elements that each shard's part has room for."""
        return -(-self._all_rows // self.shards) * self.row_elements

    def interval(self, shard: int) -> tuple[int, int]:
        """Return first element and end of a shard's part, in the flattened parameter."""
        rows = self.rows(shard)
        return rows.start * self.row_elements, rows.stop * self.row_elements

    def rows(self, shard: int) -> range:
        """Return the rows of a shard's part."""
        return part_of_rows(self._all_rows, self.shards, shard)

    @property
    def _all_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def window(self, first: int, rows: range | None = None) -> Window:
        """Return the window of rows, by default all, that lie in a buffer from element `first` on."""
        count = self._all_rows if rows is None else len(rows)
        sizes = (count, *(self.shape[dim] for dim in self.order[1:])) if self.shape else ()
        back = tuple(sorted(range(len(self.order)), key=self.order.__getitem__))
        is_plain = back == tuple(range(len(back)))
        return Window(first, first + count * self.row_elements, sizes, None if is_plain else back)


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one bucket, and their cut into shards.

    Attributes:
        slots: One per parameter, in the order of the buffer.
        shards: Number of shards.
        elements: Length of the buffer of weights.
        packed_elements: Length of one shard's parts, one after another.
    """

    slots: tuple[Slot, ...]
    shards: int
    elements: int
    packed_elements: int

    @classmethod
    def of(
        cls, parameters: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]], shards: int
    ) -> BucketLayout:
        """Lay out parameters (name, shape, order of dims in memory) one after another, for `shards`."""
        slots, end, packed = [], 0, 0
        for name, shape, order in parameters:
            slot = Slot(name, shape, order, shards, end, packed)
            slots.append(slot)
            end = _round_up(end + shards * slot.part_elements, ALIGNMENT)
            packed = _round_up(packed + slot.part_elements, ALIGNMENT)
        return cls(tuple(slots), shards, end, packed)

    @property
    def gradient_elements(self) -> int:
        """Length of the buffer of gradients: at its end every rank says which gradients it had."""
        return self.elements + self.shards * len(self.slots)

    @cached_property
    def stripes(self) -> Sequence[tuple[int, int]]:
        """First element of each parameter in the buffer, and elements of a shard's part."""
        return [(slot.offset, slot.part_elements) for slot in self.slots if slot.elements]

    @cached_property
    def gradient_stripes(self) -> Sequence[tuple[int, int]]:
        """The stripes of the buffer of gradients."""
        return [*self.stripes, (self.elements, len(self.slots))]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a buffer that are the parameters, in their shapes."""
        return [window.of(buffer) for window in self._wholes]

    def parts(self, buffer: torch.Tensor, shard: int) -> list[torch.Tensor]:
        """Return one shard's rows of every parameter in a buffer."""
        return [window.of(buffer) for window in self._windows(shard)]

    def packed_parts(self, buffer: torch.Tensor, shard: int) -> list[torch.Tensor]:
        """Return one shard's rows of every parameter in a buffer `[packed_elements]` of this shard only."""
        return [slot.window(slot.packed, slot.rows(shard)).of(buffer) for slot in self.slots]

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Write zeros between the parameters in a buffer with one shard."""
        gaps = [buffer[start:stop] for start, stop in self._gaps]
        if gaps:
            torch._foreach_zero_(gaps)

    @cached_property
    def _gaps(self) -> Sequence[tuple[int, int]]:
        ends = [slot.offset + slot.elements for slot in self.slots]
        starts = [*(slot.offset for slot in self.slots[1:]), self.elements]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    @cached_property
    def _wholes(self) -> Sequence[Window]:
        return [slot.window(slot.offset) for slot in self.slots]

    def _windows(self, shard: int) -> Sequence[Window]:
        if shard not in self._by_shard:
            self._by_shard[shard] = [
                slot.window(slot.offset + slot.interval(shard)[0], slot.rows(shard)) for slot in self.slots
            ]
        return self._by_shard[shard]

    @cached_property
    def _by_shard(self) -> dict[int, Sequence[Window]]:
        return {}


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a dense tensor in memory order, from outermost to innermost (see channels_last).

    If the first dim is not the outermost, or the tensor has gaps, return the dims in numerical order.
    """
    plain = tuple(range(tensor.dim()))
    if tensor.is_contiguous() or 0 in tensor.stride():
        return plain
    order = tuple(sorted(plain, key=lambda dim: tensor.stride(dim), reverse=True))
    return order if order[0] == 0 and tensor.permute(order).is_contiguous() else plain


def part_of_rows(rows: int, shards: int, shard: int) -> range:
    """Return the rows of a shard, out of this number of rows."""
    part = -(-rows // shards)
    return range(min(shard * part, rows), min((shard + 1) * part, rows))


def fill_buckets(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Group items, in order, into buckets that close once they hold `capacity` or more.

    Args:
        sizes: Bytes of each item.
        capacity: Bytes at which a bucket is closed; a larger item has a bucket to itself or ends one.

    Returns:
        The indices of the items of each bucket.
    """
    buckets: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        if buckets[-1] and held + size > capacity:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += size
    return [bucket for bucket in buckets if bucket]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


PART = "_shoal_part"
"""Attribute of owned parameters and gradients: which part it is, and the parameter's name."""

NO_NORM = "_shoal_no_norm"
"""Attribute of parameters and gradients whose norm here is no whole one: what the rank has of them."""

Value = TypeVar("Value")

_CHUNK = 4096  # words that a checksum adds up at a time
_WORD = 8  # bytes


class Mark(Generic[Value]):
    """What a parameter is marked with; a copy of the parameter has no value.

    Args:
        value: Gives the value, or None once its object is gone.
    """

    def __init__(self, value: Callable[[], Value | None] = lambda: None) -> None:
        self._value = value

    def __call__(self) -> Value | None:
        """Return the value."""
        return self._value()

    def __reduce__(self) -> tuple[type[Mark[Any]], tuple[()]]:
        return Mark, ()


@dataclass(frozen=True, slots=True)
class Owned:
    """The part of one of the model's parameters that this rank's optimizer changes.

    Attributes:
        name: The parameter's name in the model.
        shape: The whole parameter's shape.
        start: First element of the part in the flattened parameter, or in its flattened block.
        stop: End of the part: one past its last element.
        parameter: The parameter for the optimizer, in fp32. Over `family.mesh` it is a DTensor of the whole
            parameter's shape, cut along its first dim. Without a mesh it is an ordinary parameter: the
            model's own if this rank has it whole and it computes in fp32 too.
        family: The ranks over which the parameter is sharded and summed.
        cut: The block that contains the part; None if the parameter is not cut into blocks.
        stored: Its place in files; None if the part and its gradient are in memory.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    parameter: nn.Parameter
    family: Family
    cut: Cut | None = None
    stored: Stored | None = None

    @property
    def local(self) -> torch.Tensor:
        """Return the part itself, `[rows, ...]`, in the memory of `parameter`."""
        own = local_part(self.parameter)
        return own.data if own is self.parameter else own

    @property
    def is_first(self) -> bool:
        """Whether the part begins with the parameter's first element."""
        return self.start == 0 and (self.cut is None or self.cut.offset == 0)

    @property
    def gradient(self) -> torch.Tensor | None:
        """Return the part's gradient, `[rows, ...]`; None if there is none."""
        return None if self.parameter.grad is None else local_part(self.parameter.grad)

    def give(self, gradient: torch.Tensor | None) -> None:
        """Make a tensor `[rows, ...]` the part's gradient; None removes the present one."""
        self.parameter.grad = given = None if gradient is None else like(self.parameter, gradient)
        for mark in (PART, NO_NORM) if given is not None else ():
            if (value := getattr(self.parameter, mark, None)) is not None:
                setattr(given, mark, value)


@dataclass(frozen=True, slots=True)
class Frozen:
    """This rank's part of a parameter that is not trained: all of it, its block, or rows of either.

    Attributes:
        name: The parameter's name in the model.
        shape: The whole parameter's shape.
        start: First element of the part in the flattened parameter, or in its flattened block.
        local: The part, in the type that computes; if nothing is sharded, the model's own parameter.
        cut: The block that contains it; None if the parameter is not cut into blocks.
        is_first_copy: Whether this rank is the first of the ranks that have an equal part.
        family: The ranks over which the parameter is kept.
        shard: The ranks over which it is a DTensor; None if it is an ordinary tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    local: torch.Tensor
    cut: Cut | None
    is_first_copy: bool
    family: Family
    shard: Axis | None = None

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Return the shape of the block of which `local` has rows."""
        return self.shape if self.cut is None else self.cut.block_shape


def as_sharded(local: torch.Tensor, shape: tuple[int, ...], axis: Axis) -> torch.Tensor:
    """Return a DTensor of `shape` whose rows on this rank of the axis are `local`, in the same memory.

    A tensor without dims cannot be cut; every rank has it whole.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # a slow import that few Plans need
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    _follow_assignments(DTensor)
    # Through dlpack, for a storage that begins where the rows do: `copy.deepcopy` takes a DTensor that begins
    # elsewhere in its storage for a tensor with its own memory, and fails.
    local = from_dlpack(local)
    stride = tuple(local.stride())
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    placement = Shard(0) if shape else Replicate()
    spec = DTensorSpec(axis.mesh(local.device.type), (placement,), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _follow_assignments(kind: Any) -> None:
    """Make `parameter.data = value` change a DTensor that ranks share; torch would change only its shape."""
    if "data" in vars(kind):
        return
    plain: Any = torch.Tensor.data

    def assign(tensor: Any, value: torch.Tensor) -> None:
        if not hasattr(tensor, PART):
            plain.__set__(tensor, value)
            return
        if value.shape != tensor.shape:
            raise LayoutError(
                f"a tensor of shape {list(value.shape)} was assigned to .data of {getattr(tensor, PART)[1]}",
                possible=f"the shape of the whole parameter, {list(tensor.shape)}",
                change="give a tensor of this shape",
            )
        value = value.detach().to(tensor.dtype)
        if not hasattr(value, "_local_tensor"):
            value = kind.from_local(value, tensor.device_mesh, run_check=False)
        tensor._local_tensor = local_part(value.redistribute(placements=tensor.placements))  # type: ignore[attr-defined]

    kind.data = property(plain.__get__, assign)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: the local part of a DTensor; any other tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that holds this rank's part of a DTensor cut as `parameter` is."""
    if not hasattr(parameter, "_local_tensor"):
        return local
    kind: Any = type(parameter)
    gradient: torch.Tensor = kind(local, getattr(parameter, "_spec"), requires_grad=False)  # noqa: B009
    return gradient


def fixed_parameters(module: nn.Module, frozen: Sequence[Frozen]) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained, as `named_parameters` shows them."""
    shown = dict(module.named_parameters())
    for each in frozen:
        if each.shard is not None:
            part = as_sharded(each.local, each.block_shape, each.shard)
            shown[each.name] = nn.Parameter(part, requires_grad=False)
        elif each.local.data_ptr() != shown[each.name].data_ptr():
            shown[each.name] = nn.Parameter(each.local, requires_grad=False)
    return {each.name: shown[each.name] for each in frozen}


def require_trained(owned: Sequence[Owned]) -> None:
    """Check that a model that is laid over ranks has parameters to train.

    Raises:
        LayoutError: It has none.
    """
    if not owned:
        raise LayoutError(
            "the model had no parameter to train when it was laid over ranks, so it computes no gradients",
            possible="parameters that require gradients before shoal.parallelize",
            change="call requires_grad_() on the model, then lay it over ranks",
        )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum of a tensor's bits, an int64 scalar on its device.

    Words of 8 bytes are added up modulo 2^64 in chunks of 32 KiB, and the chunks' sums with odd factors that
    differ. So a change of one word always shows. Changes that cancel, such as two words of one chunk that
    change places, do not.
    """
    data = local_part(tensor).detach().contiguous().view(-1).view(torch.uint8)
    if data.data_ptr() % _WORD:
        data = data.clone()
    end = len(data) // _WORD * _WORD
    words = data[:end].view(torch.int64)
    chunks = len(words) // _CHUNK
    rest = torch.nn.functional.pad(data[end:], (0, end + _WORD - len(data))).view(torch.int64)
    parts = [
        words[: chunks * _CHUNK].view(chunks, _CHUNK).sum(1),
        words[chunks * _CHUNK :].sum().view(1),
        rest,
    ]
    return combined(torch.cat(parts))


def combined(sums: torch.Tensor) -> torch.Tensor:
    """Return a sum of int64 numbers `[n]` that changes if they change places."""
    factors = 2 * torch.arange(len(sums), device=sums.device) + 1
    return (sums * factors).sum()
