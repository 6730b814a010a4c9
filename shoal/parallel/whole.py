"""The whole model, assembled from the ranks' parts, under any Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.parallel.axes import Axes
from shoal.parallel.communication import Axis
from shoal.parallel.layout import Cut
from shoal.parallel.owned import Frozen, Owned
from shoal.parallel.pipeline.pieces import Pieces
from shoal.parallel.pipeline.stage_chain import Form


@dataclass(frozen=True, slots=True)
class Whole:
    """A description of a model before it was laid over ranks.

    Attributes:
        parameters: The form of each parameter by name; trained ones are fp32.
        buffers: The form of each buffer that is saved, by its name in the `state_dict`.
        mine: The buffers that this rank saves.
        keys: The keys of the `state_dict` that are parameters, each with the parameter's name.
    """

    parameters: Mapping[str, Form]
    buffers: Mapping[str, Form]
    mine: frozenset[str]
    keys: Mapping[str, str]

    @classmethod
    def of(
        cls, model: nn.Module, pieces: Pieces | None, axes: Axes, frozen: Callable[[str], torch.dtype]
    ) -> Whole:
        """Describe a model that is still whole.

        Args:
            model: The model.
            pieces: Its pipeline stages; None without a pipeline.
            axes: The axes that it is laid over.
            frozen: A function from the name of a floating parameter that is not trained to the type that it
                gets.
        """
        names = {parameter: name for name, parameter in model.named_parameters()}
        parameters = {
            name: Form(tuple(each.shape), _dtype_of(each, frozen(name))) for each, name in names.items()
        }
        saved = model.state_dict(keep_vars=True)
        keys = {key: names[value] for key, value in saved.items() if value in names}
        buffers = {
            key: Form(tuple(value.shape), value.dtype) for key, value in saved.items() if key not in keys
        }
        is_first = axes.whole.shard.index == 0 and axes.whole.is_first
        mine = {
            key
            for key in buffers
            if is_first and axes.pp.index == (0 if pieces is None else pieces.holder_of(model, key))
        }
        return cls(parameters, buffers, frozenset(mine), keys)

    def form_of(self, key: str) -> Form:
        """Return the form of a tensor of the `state_dict`."""
        return self.parameters[self.keys[key]] if key in self.keys else self.buffers[key]

    def buffers_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the buffers that are saved, as a rank has them, by their names in the `state_dict`."""
        named = dict(model.named_buffers(remove_duplicate=False))
        return {key: named[key] for key in self.buffers if key in named}

    def gather(
        self,
        model: nn.Module,
        owned: Sequence[Owned],
        frozen: Sequence[Frozen],
        cuts: Mapping[str, Cut],
        world: Axis,
        device: torch.device,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of the `state_dict`, one after another, equal on every rank.

        For each element one rank adds the value, and the others add zero, so the sums are exact.

        Args:
            model: This rank's part of the model.
            owned: This rank's parts of the trained parameters.
            frozen: This rank's parts of the other parameters.
            cuts: This rank's block of each parameter that tp or ep cuts, by name.
            world: All ranks, which make the iteration together.
            device: Device on which the tensors are made.
        """
        held: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for frozen_part in frozen:
            if frozen_part.is_first_copy:
                held.setdefault(frozen_part.name, []).append((frozen_part.start, frozen_part.local))
        for part in owned:
            if part.family.is_first:
                held.setdefault(part.name, []).append((part.start, part.local))
        for key, buffer in self.buffers_of(model).items():
            if key in self.mine:
                held[key] = [(0, buffer)]
        known: dict[str, torch.Tensor] = {}
        for key in (*self.keys, *self.buffers):
            name = self.keys.get(key, key)
            if name not in known:
                whole = _summed(self.form_of(key), held.get(name, []), cuts.get(name), device)
                world.all_reduce(whole, f"whole {name}").wait()
                known = {name: whole}  # a tied parameter follows at once, or is gathered again
            yield key, known[name]


def _dtype_of(parameter: nn.Parameter, frozen: torch.dtype) -> torch.dtype:
    if parameter.requires_grad:
        return torch.float32
    return frozen if parameter.is_floating_point() else parameter.dtype


def _summed(
    form: Form, held: Sequence[tuple[int, torch.Tensor]], cut: Cut | None, device: torch.device
) -> torch.Tensor:
    """Return what this rank adds to a whole tensor; zero for elements that it does not have."""
    whole = torch.zeros(form.shape, dtype=form.dtype, device=device)
    block = whole if cut is None else cut.of(whole)
    flat = torch.zeros(block.numel(), dtype=form.dtype, device=device)
    for start, values in held:
        flat[start : start + values.numel()] = values.reshape(-1)
    block.copy_(flat.view(block.shape))
    return whole
