"""Buffers that training changes, such as BatchNorm's statistics.

Each rank's follow its own data. A step that is left out must not have changed them, so those that change are
copied before each step: all before the first, since then it is known which do.
"""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from shoal.parallel import Axis

__all__ = ["ChangingBuffers"]


@final
class ChangingBuffers:
    """Remembers the buffers that steps change, and can put them back.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._changing: set[int] | None = None
        self._before: dict[int, torch.Tensor] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    def begin_step(self) -> None:
        """Copies those that are known to change."""
        held = [self._at(place) for place in range(len(self._places))]
        self._versions = [(buffer, buffer._version) for buffer in held]
        chosen = range(len(held)) if self._changing is None else self._changing
        self._before = {place: held[place].clone() for place in chosen}

    def end_step(self) -> None:
        """Learns which the step changed."""
        self._changing = (self._changing or set()) | set(self._changed())

    def put_back(self) -> None:
        """Undoes what the step did to them."""
        for place in self._changed():
            if place in self._before:
                module, name = self._places[place]
                original = self._versions[place][0]
                original.copy_(self._before[place])
                module._buffers[name] = original

    @torch.no_grad()
    def average(self, axis: Axis) -> None:
        """Gives those of floating type that change the mean over the ranks of an axis, which all call it."""
        chosen = [self._at(place) for place in sorted(self._changing or ())]
        floating = [buffer for buffer in chosen if buffer.is_floating_point()]
        if axis.size == 1 or not floating:
            return
        flat = torch.cat([buffer.detach().float().flatten() for buffer in floating])
        axis.all_reduce(flat, "buffers").wait()
        flat /= axis.size
        for buffer, mean in zip(floating, flat.split([each.numel() for each in floating]), strict=True):
            buffer.copy_(mean.view(buffer.shape))

    def _at(self, place: int) -> torch.Tensor:
        module, name = self._places[place]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _changed(self) -> list[int]:
        return [
            place
            for place, (buffer, version) in enumerate(self._versions)
            if self._at(place) is not buffer or buffer._version != version
        ]
