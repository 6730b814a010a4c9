"""The mean over workers of what their optimizers keep.

Workers may keep unlike things: an optimizer has a state of the parameters that got a gradient, and workers
that route tokens otherwise use other experts. So they first tell each other what they have.

    for each element    the mean over all workers; zeros where a worker has no such state, as before the first
                        gradient
    counts              the largest: a worker that did not use a parameter has seen zeros in as many steps
    other numbers       the mean over the workers that have one
    other tensors       those of the first worker that has them, such as codes of 8 bits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.collectives.values import all_gather_value
from shoal.parallel.offload.offloaded_optimizer import OffloadedOptimizer
from shoal.parallel.optimizer.composed import parts_of
from shoal.parallel.owned import Owned, local_part
from shoal.parallel.parallel import Parallel

_COUNT = "step"
"""Key of a count of steps in torch's optimizers."""


@torch.no_grad()
def average_states(parallel: Parallel, optimizer: Optimizer) -> None:
    """Give the optimizers of all workers one state; all ranks call it together.

    Args:
        parallel: The model.
        optimizer: The optimizer of this rank's worker.
    """
    axis = parallel.axes.workers
    if axis.size == 1:
        return
    places = [(part, each) for part, owned in parts_of(optimizer, parallel.owned) for each in owned]
    own = [_described(owned, part.state.get(owned.parameter, {})) for part, owned in places]
    told = all_gather_value(own, axis.process_group)
    summed = []
    for (part, owned), of_workers in zip(places, zip(*told, strict=True), strict=True):
        keys = dict.fromkeys(key for each in of_workers for key in each)
        state = part.state[owned.parameter] if keys else {}
        for key in keys:
            having = [number for number, each in enumerate(of_workers) if key in each]
            found = [of_workers[number][key] for number in having]
            held = _held(part, owned, state, key, found[0])
            if "value" in found[0]:
                _set(state, key, _joined(key, [each["value"] for each in found]))
            elif held.numel() and held.is_floating_point():
                sent = held.to(parallel.device, torch.float32, copy=True).contiguous()
                summed.append((held, sent, axis.all_reduce(sent, f"state {key}")))
            elif held.numel():
                sent = held.to(parallel.device, copy=True).contiguous()
                axis.broadcast(sent, f"state {key}", having[0]).wait()
                held.copy_(sent)
    for held, sent, pending in summed:
        pending.wait()
        held.copy_(sent.div_(axis.size))


def _described(owned: Owned, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of a state that are numbers, and the forms of its tensors."""
    described: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            local = local_part(value)
            form = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(local.shape)}
            described[key] = {**form, "device": value.device.type}
            is_of_element = key != _COUNT and value.is_floating_point() and not owned.shape
            if not value.dim() and not is_of_element:
                described[key]["value"] = local.item()
        elif isinstance(value, (bool, int, float)):
            described[key] = {"value": value}
    return described


def _held(part: Optimizer, owned: Owned, state: dict[str, Any], key: str, form: Mapping[str, Any]) -> Any:
    """Return this rank's part of a state, made of zeros if this worker has none; None for a number."""
    if "dtype" not in form:
        return None
    if not isinstance(state.get(key), torch.Tensor):
        dtype, shape = getattr(torch, form["dtype"]), form["shape"]
        if isinstance(part, OffloadedOptimizer):
            state[key] = part.place_of(owned.parameter, key, dtype).zero_()
        elif shape == list(owned.local.shape) and key != _COUNT:
            state[key] = torch.zeros_like(owned.parameter, dtype=dtype, requires_grad=False)
        else:
            device = "cpu" if form["device"] == "cpu" else owned.local.device
            state[key] = torch.zeros(shape, dtype=dtype, device=device)
    return local_part(state[key])


def _set(state: dict[str, Any], key: str, value: float) -> None:
    if isinstance(state.get(key), torch.Tensor):
        local_part(state[key]).fill_(value)
    else:
        state[key] = value


def _joined(key: str, values: Sequence[float]) -> float:
    is_count = key == _COUNT or isinstance(values[0], int)
    return max(values) if is_count else fmean(values)
