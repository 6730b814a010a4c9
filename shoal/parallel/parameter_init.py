"""The first values of a model's parameters, written one by one to where training keeps them.

A model on a real device has them. A model on the meta device makes them in its method
`initialize_parameter(name, tensor, seed)`, one whole parameter at a time. So a rank holds its parts and one
whole parameter, in memory that is used again for the next one: glibc would not use a freed block of up to
32 MiB for an equal one, as aligned blocks take more room than they leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.parallel.axes import Axes
from shoal.parallel.local_shards import Cut


@final
class FirstValues:
    """Write first values.

    Args:
        give: Writes the values of the parameter with a name into a tensor of its whole shape.
        cuts: The block of each parameter that a rank takes out of it, by name.
    """

    def __init__(self, give: Callable[[str, torch.Tensor], object], cuts: Mapping[str, Cut]) -> None:
        self._give = give
        self._cuts = cuts
        self._whole = _Scratch()
        self._block = _Scratch()

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Write a parameter, or this rank's block of it, into a tensor of that shape."""
        cut = self._cuts.get(name)
        if cut is None:
            self._give(name, tensor)
            return
        whole = self._whole.take(cut.shape, tensor)
        self._give(name, whole)
        tensor.copy_(cut.of(whole))

    def fill_rows(self, name: str, shape: tuple[int, ...], rows: range, part: torch.Tensor) -> None:
        """Write some rows of a parameter, or of this rank's block of it, which has this shape."""
        block = self._block.take(shape, part)
        self.fill(name, block)
        part.copy_(block[rows.start : rows.stop] if shape else block)


@final
class _Scratch:
    """Memory for one tensor at a time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this shape, with the type and device of another; it replaces the last one."""
        nbytes = math.prod(shape) * like.dtype.itemsize
        if self._buffer.numel() < nbytes or self._buffer.device != like.device:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._buffer[:nbytes].view(like.dtype).view(shape)


def take_first_values(
    model: nn.Module, seed: int, device: torch.device, axes: Axes, cuts: Mapping[str, Cut]
) -> FirstValues:
    """Give all ranks rank 0's values and cut the parameters; or let the parameters leave the meta device.

    Raises:
        ModelError: Tensors are on the meta device, and nothing can give them values.
    """
    named, tensors = dict(model.named_parameters()), [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        for pending in [axes.world.broadcast(tensor.data, "first values") for tensor in tensors]:
            pending.wait()
        for name, cut in cuts.items():
            named[name].data = cut.of(named[name].data).clone(memory_format=torch.contiguous_format)
        return FirstValues(partial(_copy, named), {})
    initialize: Any = getattr(model, "initialize_parameter", None)
    are_empty = all(parameter.is_meta for parameter in named.values())
    if initialize is None or not are_empty or any(buffer.is_meta for buffer in model.buffers()):
        raise ModelError(
            f"{type(model).__name__} has tensors on the meta device that nothing can initialize",
            possible="on the meta device, all parameters and no buffers, and a model with a method "
            "initialize_parameter(name, tensor, seed)",
            change="build the model on a real device, or add the method",
        )
    _leave_meta(model, device, {id(named[name]): cut for name, cut in cuts.items()})
    return FirstValues(lambda name, tensor: initialize(name, tensor, seed), cuts)


def _copy(named: Mapping[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    tensor.copy_(named[name].detach())


def _leave_meta(model: nn.Module, device: torch.device, cuts: Mapping[int, Cut]) -> None:
    """Replace parameters on the meta device by ones without memory of their own; `cuts` is by identity."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in replaced:
                cut = cuts.get(id(parameter))
                shape = parameter.shape if cut is None else cut.block_shape
                placeholder = torch.full((), torch.nan, dtype=parameter.dtype, device=device)
                replaced[parameter] = nn.Parameter(
                    placeholder.expand(shape), requires_grad=parameter.requires_grad
                )
            setattr(module, name, replaced[parameter])
