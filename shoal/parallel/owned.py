"""A rank's parts of the model's parameters: the trained ones (Owned) and the others (Frozen)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from shoal.errors import LayoutError
from shoal.parallel.axes import Family
from shoal.parallel.communication import Axis
from shoal.parallel.layout import Cut
from shoal.parallel.offload.stored_shard import Stored

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
