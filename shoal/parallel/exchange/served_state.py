"""The state of an optimizer, by parameter as a rank has it, and by parameter's part as servers have it.

A server updates a window of the vector in which all parameters lie one after another. Its optimizer's state
has the same keys: tensors with an element for each of the part, and tensors of one element. A parameter that
no step had a gradient of has no state.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from shoal.errors import LayoutError, TrainingError
from shoal.parallel.exchange.server import Blueprint
from shoal.parallel.local_shards import Owned, local_part
from shoal.parallel.optimizer.joined_optimizers import Composed, title_of
from shoal.parallel.parallel import Parallel


def pack(owned: Sequence[Owned], tensors: Sequence[torch.Tensor | None], vector: torch.Tensor) -> None:
    """Copy a tensor for each part into a vector.

    Args:
        owned: The parts, in order.
        tensors: For each part, a tensor like it; None for zeros.
        vector: `[elements]`, fp32.
    """
    given = [
        torch.zeros_like(each.local) if one is None else one for each, one in zip(owned, tensors, strict=True)
    ]
    torch._foreach_copy_(_views(owned, vector), given)


def unpack(owned: Sequence[Owned], vector: torch.Tensor) -> None:
    """Copy a vector into the parts that `pack` made one of."""
    torch._foreach_copy_([each.local for each in owned], _views(owned, vector))


def _views(owned: Sequence[Owned], vector: torch.Tensor) -> list[torch.Tensor]:
    parts = vector.split([each.local.numel() for each in owned])
    return [part.view(each.local.shape) for part, each in zip(parts, owned, strict=True)]


_OfServer = tuple[Sequence[Mapping[str, Any]], Sequence[torch.Tensor]]


@final
class Loaded:
    """Notices weights that are loaded into a worker.

    Args:
        parallel: The model of the worker.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._loads = Counter(parallel.loads)

    def require(self, values: torch.Tensor) -> None:
        """Check that weights that were loaded since the last call are these, `[elements]`.

        Raises:
            TrainingError: They are others, which the next values from the servers would replace.
        """
        if self._parallel.loads == self._loads:
            return
        self._loads = Counter(self._parallel.loads)
        owned, own = self._parallel.owned, torch.empty_like(values)
        pack(owned, [each.local for each in owned], own)
        if not torch.equal(own, values):
            raise TrainingError(
                "weights were loaded into a worker that has joined its servers, whose values would replace "
                "them: load weights into all workers before their first share()"
            )


def require_elementwise(optimizer: Optimizer) -> None:
    """Check that servers can step an optimizer on their windows of the parameters.

    Raises:
        LayoutError: Its update of an element depends on others.
    """
    if isinstance(optimizer, Composed):
        raise LayoutError(
            f"parameter servers were given {title_of(optimizer)}, whose update of an element depends on "
            "others",
            possible="optimizers that update each element by itself: adamw, sgd, lion",
            change="choose one of these, or exchange=local without servers",
        )


def give_state(optimizer: Optimizer, owned: Sequence[Owned], windows: Sequence[slice]) -> list[_OfServer]:
    """Return the state of a rank's optimizer for each server; an empty list if it has none.

    Args:
        optimizer: The optimizer.
        owned: The parameters in the vector, in order.
        windows: The elements of each server.
    """
    states = [optimizer.state.get(each.parameter, {}) for each in owned]
    if not any(states):
        return []
    stops = list(itertools.accumulate(each.local.numel() for each in owned))
    given: list[_OfServer] = []
    for window in windows:
        described: list[dict[str, Any]] = []
        tensors: list[torch.Tensor] = []
        for each, state, stop in zip(owned, states, stops, strict=True):
            start = stop - each.local.numel()
            low, high = max(start, window.start), min(stop, window.stop)
            if low >= high:
                continue
            here: dict[str, Any] = {}
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                tensor = local_part(value).detach().cpu()
                if key != "step" and tensor.numel() == each.local.numel():
                    tensor = tensor.reshape(-1)[low - start : high - start]
                here[key] = [str(tensor.dtype), list(tensor.shape)]
                tensors.append(tensor.contiguous())
            described.append(here)
        given.append((described, tensors))
    return given


def take_state(
    optimizer: Optimizer,
    owned: Sequence[Owned],
    blueprint: Blueprint,
    windows: Sequence[slice],
    fetched: Sequence[tuple[Sequence[Mapping[str, Any]], torch.Tensor]],
) -> None:
    """Make the state that servers gave the state of a rank's optimizer.

    Args:
        optimizer: The optimizer; its state is replaced.
        owned: The parameters in the vector, in order.
        blueprint: The runs of the whole vector.
        windows: The elements of each server.
        fetched: What `Servers.fetch` returned.
    """
    runs = [
        (first, elements, tensors)
        for window, (described, body) in zip(windows, fetched, strict=True)
        for first, elements, tensors in _runs(blueprint, window, described, body)
    ]
    optimizer.state.clear()
    start = 0
    for each in owned:
        stop = start + each.local.numel()
        state: dict[str, Any] = {}
        for first, elements, tensors in runs:
            low, high = max(start, first), min(stop, first + elements)
            if low >= high:
                continue
            for key, tensor in tensors.items():
                if tensor.dim():
                    if key not in state:
                        state[key] = torch.zeros_like(each.parameter, dtype=tensor.dtype, requires_grad=False)
                    local = local_part(state[key]).view(-1)
                    local[low - start : high - start].copy_(tensor[low - first : high - first])
                else:
                    state[key] = tensor.clone()
        if state:
            optimizer.state[each.parameter] = state
        start = stop


def _runs(
    blueprint: Blueprint, window: slice, described: Sequence[Mapping[str, Any]], body: torch.Tensor
) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    """Return each run's first element, length and tensors."""
    first, at, found = window.start, 0, []
    runs = blueprint.window(window.start, window.stop).runs
    for (_, elements), here in zip(runs, described, strict=True):
        tensors: dict[str, torch.Tensor] = {}
        for key, (name, shape) in here.items():
            tensor = torch.empty(shape, dtype=getattr(torch, name.removeprefix("torch.")))
            bytes = tensor.numel() * tensor.element_size()
            tensor.view(-1).view(torch.uint8).copy_(body[at : at + bytes])
            at += bytes
            tensors[key] = tensor
        found.append((first, elements, tensors))
        first += elements
    return found
