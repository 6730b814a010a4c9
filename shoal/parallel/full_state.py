"""The state of a model that is laid over ranks, as `state_dict` and `load_state_dict` handle it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.collectives.values import broadcast_value
from shoal.errors import ModelError
from shoal.parallel.axes import Axes
from shoal.parallel.communication import Axis
from shoal.parallel.compiled import plain_key
from shoal.parallel.local_shards import Cut, Frozen, Owned, as_sharded, checksum, local_part
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


class State:
    """This rank's part of each tensor of a model's `state_dict`.

    Args:
        module: The model.
        whole: Description of the model before it was laid over ranks.
        owned: This rank's parts of the trained parameters.
        frozen: This rank's parts of the other parameters.
        cuts: This rank's block of each parameter that tp or ep cuts, by name.
        axes: The axes that the model is laid over.

    Attributes:
        loads: How often values of each trained parameter were loaded on this rank, by its name; whoever
            loads counts.
        chances: How often values may have been loaded, equal on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        whole: Whole,
        owned: Sequence[Owned],
        frozen: Sequence[Frozen],
        cuts: Mapping[str, Cut],
        axes: Axes,
    ) -> None:
        self._module = module
        self._whole = whole
        self._owned = {each.name: each for each in owned}
        self._frozen = {each.name: each for each in frozen}
        self._cuts = cuts
        self._axes = axes
        self.loads: Counter[str] = Counter()
        self.chances = 0

    def named(self) -> dict[str, torch.Tensor]:
        """Return this rank's `state_dict`; its DTensors lie in the memory where training keeps them.

        Raises:
            ModelError: Tensor or expert parallelism cuts parameters, so that a rank has only a block of them.
        """
        if self._cuts:
            raise ModelError(
                f"state_dict() would give blocks of parameters such as {next(iter(self._cuts))}, "
                "which tensor or expert parallelism splits",
                possible="full_state_dict() for the whole model on rank 0, or shoal.save",
                change="call one of these",
            )
        state: dict[str, torch.Tensor] = {}
        for key, name in self._whole.keys.items():
            if name in self._owned:
                state[key] = self._owned[name].parameter.detach()
            elif name in self._frozen:
                frozen = self._frozen[name]
                state[key] = frozen.local
                if frozen.shard is not None:
                    state[key] = as_sharded(frozen.local, frozen.block_shape, frozen.shard)
        return {**state, **self._whole.buffers_of(self._module)}

    def load(self, given: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
        """Load tensors, whole or cut as in `named`; change nothing if one does not fit.

        Args:
            given: Tensors by the names of the `state_dict`. Every rank gives all of them.
            strict: Whether names have to be the same.

        Returns:
            The missing names, and the names that the model does not have.

        Raises:
            ModelError: A tensor has another shape, or names differ and `strict` is set.
        """
        given = {plain_key(key): value for key, value in given.items()}
        shapes = {key: _shape_of(value) for key, value in given.items()}
        is_own = not self._cuts and shapes.keys() == self.named().keys()  # a stage has no others
        missing, unexpected = self._require_fit(shapes, strict and not is_own)
        for key, take in list(self._takers(given)):
            take(given[key])
        self.loads.update({self._whole.keys[key] for key in given if key in self._whole.keys})
        self.chances += 1
        return missing, unexpected

    def load_from_first(self, given: Mapping[str, torch.Tensor]) -> None:
        """Load whole tensors from rank 0; all ranks call it.

        Raises:
            ModelError: As for `load`, on every rank.
        """
        world = self._axes.world
        given = {plain_key(key): value for key, value in given.items()}
        shapes = {key: tuple(value.shape) for key, value in given.items()}
        if world.size > 1:
            shapes = broadcast_value(shapes)
        self._require_fit(shapes, strict=True)
        takers = dict(self._takers(shapes))
        for key in shapes:
            form = self._whole.form_of(key)
            tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
            if world.index == 0:
                tensor.copy_(given[key])
            world.broadcast(tensor, f"whole {key}").wait()
            if key in takers:
                takers[key](tensor)
        self.loads.update(self._owned.keys())
        self.chances += 1

    @contextmanager
    def writable(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Count parameters whose values change on this rank in a context, or at its end, as loaded."""
        before = self._checksums()
        try:
            with context:
                yield
        finally:
            pairs = zip(self._owned, before, self._checksums(), strict=True)
            self.loads.update([name for name, old, new in pairs if old != new])
            self.chances += 1

    def _checksums(self) -> list[int]:
        """Return the checksums of this rank's parts, in their order; the host waits for its device once."""
        sums = [checksum(each.local) for each in self._owned.values()]
        return torch.stack(sums).tolist() if sums else []

    @property
    def _device(self) -> torch.device:
        return next(each.local for part in (self._owned, self._frozen) for each in part.values()).device

    def _require_fit(
        self, shapes: Mapping[str, tuple[int, ...]], strict: bool
    ) -> tuple[list[str], list[str]]:
        wanted = {*self._whole.keys, *self._whole.buffers}
        missing = [key for key in (*self._whole.keys, *self._whole.buffers) if key not in shapes]
        unexpected = [key for key in shapes if key not in wanted]
        if strict and (missing or unexpected):
            parts = [f"lacks {_some(missing)}"] * bool(missing) + [
                f"has {_some(unexpected)}, which the model does not have"
            ] * bool(unexpected)
            raise ModelError(
                f"the state {' and '.join(parts)}",
                possible="the names of the model's own state_dict()",
                change="give the whole state of this model, or strict=False",
            )
        for key, shape in shapes.items():
            if key in wanted and shape != self._whole.form_of(key).shape:
                raise ModelError(
                    f"the state's {key} has the shape {list(shape)}",
                    possible=f"the model's, {list(self._whole.form_of(key).shape)}",
                    change="give the state of this model",
                )
        return missing, unexpected

    def _takers(self, keys: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Any], None]]]:
        """Yield each key of which this rank has a part, with a function that loads the part."""
        buffers = self._whole.buffers_of(self._module)
        for key in keys:
            name = self._whole.keys.get(key)
            if name in self._owned:
                owned = self._owned[name]
                yield key, self._taker(owned.local, owned.start, self._cuts.get(name))
            elif name in self._frozen:
                frozen = self._frozen[name]
                yield key, self._taker(frozen.local, frozen.start, self._cuts.get(name))
            elif key in buffers:
                yield key, partial(_copy, buffers[key])

    def _taker(self, local: torch.Tensor, start: int, cut: Cut | None) -> Callable[[Any], None]:
        @torch.no_grad()
        def take(value: Any) -> None:
            own = local_part(value)
            if own is not value and own.shape == local.shape and cut is None:
                local.copy_(own)
                return
            whole = value if own is value else value.full_tensor()
            block = whole if cut is None else cut.of(whole)
            local.copy_(_rows(block, start, local))

        return take


def _rows(block: torch.Tensor, start: int, local: torch.Tensor) -> torch.Tensor:
    """Return as many rows of a block as `local` has, from element `start` on."""
    if not local.dim():
        return block
    row = block[0].numel() if len(block) else 0
    first = start // row if row else 0
    return block[first : first + len(local)]


def _copy(into: torch.Tensor, value: torch.Tensor) -> None:
    into.copy_(value)


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
