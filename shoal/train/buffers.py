"""Buffers that training changes, such as BatchNorm's statistics.

These follow each rank's own data. A step that is left out must not change them, so buffers that change are
copied before each step. The first step, before which all are copied, shows which ones change; later torch's
count of changes shows it. That count misses changes by BatchNorm's kernels, so statistics are always copied.
Numbers in attributes beside a buffer, such as the length that rotary frequencies are for, are restored too.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn

from shoal.parallel import Axis
from shoal.parallel.plain_state import plain_state

__all__ = ["ChangingBuffers"]


@final
class ChangingBuffers:
    """Remember the buffers that steps change, and restore them on request.

    Args:
        model: The model that has the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._changing = {
            place
            for place, (module, _) in enumerate(self._places)
            if getattr(module, "track_running_stats", False)
        }
        self._is_first = True
        self._before: dict[int, torch.Tensor] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        self._modules = list(dict.fromkeys(module for module, _ in self._places))
        self._plain: list[dict[str, Any]] = []

    def begin_step(self) -> None:
        """Copy the buffers that are known to change, and note the numbers beside all buffers."""
        self._plain = [plain_state(module) for module in self._modules]
        held = {place: self._at(place) for place in range(len(self._places))}
        self._versions = {
            place: (buffer, buffer._version) for place, buffer in held.items() if buffer is not None
        }
        chosen = held if self._is_first else self._changing
        self._before = {place: buffer.clone() for place in chosen if (buffer := held[place]) is not None}

    def end_step(self, is_finite: torch.Tensor) -> None:
        """Learn which buffers the step changed; undo that unless `is_finite`, a scalar on the device."""
        for place, (buffer, version) in self._versions.items():
            is_counted = self._at(place) is not buffer or buffer._version != version
            if is_counted or (self._is_first and not torch.equal(buffer, self._before[place])):
                self._changing.add(place)
        self._is_first = False
        for place, before in self._before.items():
            if place in self._changing:
                self._keep_if(is_finite, place, before)
        self._before.clear()
        changed = [
            (module, name, value)
            for module, plain in zip(self._modules, self._plain, strict=True)
            for name, value in plain.items()
            if vars(module).get(name) is not value
        ]
        if changed and not is_finite.item():  # only the host can restore them
            for module, name, value in changed:
                setattr(module, name, value)

    def _keep_if(self, is_finite: torch.Tensor, place: int, before: torch.Tensor) -> None:
        module, name = self._places[place]
        original, changed = self._versions[place][0], self._at(place)
        if changed is None or changed.shape != before.shape or changed.dtype != before.dtype:
            if is_finite.item():  # nothing on the device can choose between tensors of two forms
                return
            changed = before
        kept = torch.where(is_finite, changed, before)
        if changed is original:
            original.copy_(kept)
        else:  # another tensor took its place, and attributes may still name the first
            module._buffers[name] = kept

    @torch.no_grad()
    def average(self, axis: Axis) -> None:
        """Set changing floating buffers to their mean over the ranks of an axis, which all call it."""
        chosen = [self._at(place) for place in sorted(self._changing)]
        floating = [buffer for buffer in chosen if buffer is not None and buffer.is_floating_point()]
        if axis.size == 1 or not floating:
            return
        flat = torch.cat([buffer.detach().float().flatten() for buffer in floating])
        axis.all_reduce(flat, "buffers").wait()
        flat /= axis.size
        for buffer, mean in zip(floating, flat.split([each.numel() for each in floating]), strict=True):
            buffer.copy_(mean.view(buffer.shape))

    def _at(self, place: int) -> torch.Tensor | None:
        module, name = self._places[place]
        return module._buffers.get(name)
