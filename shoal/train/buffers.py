"""Buffers that training changes, such as BatchNorm's statistics, and attributes of modules.

These follow each rank's own data. A step that is left out must not change them, so tensors that change are
copied before each step. The first step that has a tensor, before which it is copied, shows whether it
changes; later torch's count of changes shows it. That count misses changes by BatchNorm's kernels, so
statistics are always copied. Numbers and lists in attributes, such as the length that rotary frequencies are
for, are restored too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.parallel import Axis
from shoal.parallel.plain_state import attributes, is_changed, put_back

_Place = tuple[nn.Module, str]


@final
class ChangingBuffers:
    """Remember the buffers and attributes that steps change, and restore them on request.

    Args:
        model: The model that has them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._changing = {
            (module, name)
            for module in self._modules
            for name in module._buffers
            if getattr(module, "track_running_stats", False)
        }
        self._watched: set[_Place] = set()
        self._before: dict[_Place, Tensor] = {}
        self._versions: dict[_Place, tuple[Tensor, int]] = {}
        self._plain: list[dict[str, Any]] = []

    def begin_step(self) -> None:
        """Copy the tensors that are new or known to change, and note all other state in attributes."""
        self._plain = [attributes(module) for module in self._modules]
        held = dict(self._held())
        self._versions = {place: (tensor, tensor._version) for place, tensor in held.items()}
        self._before = {
            place: tensor.clone()
            for place, tensor in held.items()
            if place in self._changing or place not in self._watched
        }

    @torch.no_grad()
    def end_step(self, is_finite: Tensor) -> None:
        """Learn what the step changed; undo that unless `is_finite`, a scalar on the device."""
        for place, (tensor, version) in self._versions.items():
            is_counted = self._at(place) is not tensor or tensor._version != version
            is_new = place not in self._watched
            if is_counted or (is_new and not torch.equal(tensor, self._before[place])):
                self._changing.add(place)
        self._watched.update(self._versions)
        for place, before in self._before.items():
            if place in self._changing:
                self._keep_if(is_finite, place, before)
        self._before.clear()
        states = zip(self._modules, self._plain, strict=True)
        changed = [(module, plain) for module, plain in states if is_changed(module, plain)]
        if changed and not is_finite.item():  # only the host can restore them
            for module, plain in changed:
                put_back(module, plain)

    def _keep_if(self, is_finite: Tensor, place: _Place, before: Tensor) -> None:
        original, changed = self._versions[place][0], self._at(place)
        if changed is None or changed.shape != before.shape or changed.dtype != before.dtype:
            if is_finite.item():  # nothing on the device can choose between tensors of two forms
                return
            changed = before
        kept = torch.where(is_finite.to(before.device), changed, before)
        if changed is original:
            original.copy_(kept)
        else:  # another tensor took its place, and attributes may still name the first
            self._store(place)[place[1]] = kept

    @torch.no_grad()
    def average(self, axis: Axis) -> None:
        """Set changing floating buffers to their mean over the ranks of an axis, which all call it."""
        chosen = [
            buffer
            for module in self._modules
            for name, buffer in module._buffers.items()
            if (module, name) in self._changing
        ]
        floating = [buffer for buffer in chosen if buffer is not None and buffer.is_floating_point()]
        if axis.size == 1 or not floating:
            return
        flat = torch.cat([buffer.detach().float().flatten() for buffer in floating])
        axis.all_reduce(flat, "buffers").wait()
        flat /= axis.size
        for buffer, mean in zip(floating, flat.split([each.numel() for each in floating]), strict=True):
            buffer.copy_(mean.view(buffer.shape))

    def _held(self) -> Iterator[tuple[_Place, Tensor]]:
        for module, plain in zip(self._modules, self._plain, strict=True):
            for name, value in (*module._buffers.items(), *plain.items()):
                if isinstance(value, Tensor):
                    yield (module, name), value

    def _store(self, place: _Place) -> dict[str, Any]:
        module, name = place
        return module._buffers if name in module._buffers else vars(module)

    def _at(self, place: _Place) -> Tensor | None:
        found = self._store(place).get(place[1])
        return found if isinstance(found, Tensor) else None
