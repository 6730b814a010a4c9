"""A copy in host memory of what steps change on a rank, from which they can be made again.

Buffers that training changes, such as BatchNorm's statistics, and attributes of modules.

These follow each rank's own data. A step that is left out must not change them, so tensors that change are
copied before each step. The first step that has a tensor, before which it is copied, shows whether it
changes; later torch's count of changes shows it. That count misses changes by BatchNorm's kernels, so
statistics are always copied. Numbers and lists in attributes, such as the length that rotary frequencies are
for, are restored too.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from shoal.collectives.host_buffers import BounceBuffers
from shoal.data import key_of, seed_generators
from shoal.errors import ConfigError
from shoal.parallel import Axis, GuidedUpdates, Parallel
from shoal.parallel.local_shards import local_part
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


_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def begin_anew(seed: int, step: int, place: int) -> None:
    """Seed all generators from values that a run knows under any Plan.

    Args:
        seed: The run's seed.
        step: Optimizer steps made.
        place: Index of this rank among those with other data. Ranks with equal data, such as those of tp and
            pp, get equal seeds: their results for one hidden state, such as dropout, must agree.
    """
    key = key_of(seed, step, place)
    seed_generators(key)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(key)


@contextmanager
def compute_deterministically(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let this process's operators give the same bits each time; enter it before the first product on a GPU.

    torch would also fill all new memory, which is one more pass over the result of each operator. That only
    helps if memory is read that was never written, which would be a mistake.

    Args:
        environment: The environment, which meanwhile has the workspace that cuBLAS then needs.

    Raises:
        ConfigError: The environment sets a workspace with which cuBLAS is not deterministic.
    """
    given = environment.get(_WORKSPACE)
    if given not in (None, *_WORKSPACES):
        raise ConfigError(
            f"deterministic=true was given, and {_WORKSPACE}={given}, with which cuBLAS is not deterministic",
            possible=" or ".join(_WORKSPACES),
            change=f"unset {_WORKSPACE}, or leave out deterministic=true",
        )
    memory: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills, benchmark = memory.fill_uninitialized_memory, cudnn.benchmark
    environment.setdefault(_WORKSPACE, _WORKSPACES[0])
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory, cudnn.benchmark = fills, benchmark
        if given is None:
            environment.pop(_WORKSPACE, None)


def nondeterministic_operator(error: RuntimeError) -> str:
    """Return the operator that torch refused because it has no deterministic form; "" for other errors."""
    found = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    return found[1] if found else ""


def random_state() -> dict[str, torch.Tensor]:
    """Return the states of the generators of torch (CPU, current CUDA device if any), Python and numpy."""
    state = {"cpu": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if torch.cuda.is_initialized():  # otherwise this process computes on the CPU, beside GPUs
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Restore a result of `random_state`."""
    torch.set_rng_state(state["cpu"])
    version, *words = state["python"][:-2].tolist()
    has_gauss, gauss = state["python"][-2:].tolist()
    random.setstate((version, tuple(words), _as_float(gauss) if has_gauss else None))
    key, (position, has_gauss, gauss) = state["numpy"][:-3].numpy(), state["numpy"][-3:].tolist()
    np.random.set_state(("MT19937", key.astype(np.uint32), position, has_gauss, _as_float(gauss)))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _python_state() -> torch.Tensor:
    version, words, gauss = random.getstate()
    return torch.tensor([version, *words, int(gauss is not None), _as_int(gauss or 0.0)])


def _numpy_state() -> torch.Tensor:
    state = np.random.get_state(legacy=False)
    words, gauss = state["state"], _as_int(state["gauss"])
    return torch.tensor([*map(int, words["key"]), words["pos"], state["has_gauss"], gauss])


def _as_int(number: float) -> int:
    return int(np.float64(number).view(np.int64))


def _as_float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


class _State(NamedTuple):
    """The state of one parameter in one optimizer: the optimizer's own, and its values now."""

    held: dict[str, Any]
    copied: dict[str, Any]


@final
class Snapshot:
    """The values of a rank's parts of the parameters, its optimizer's state, buffers and generators.

    Take it and restore it while whole gradients are averaged: what another exchange keeps is not in it.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: GuidedUpdates,
        values: Sequence[torch.Tensor],
        states: Sequence[_State],
    ) -> None:
        self._parallel = parallel
        self._optimizer = optimizer
        self._values = values
        self._states = states
        self._buffers = {name: buffer.clone() for name, buffer in parallel.module.named_buffers()}
        self._random = random_state()
        self._steps = optimizer.steps

    @classmethod
    def take(cls, parallel: Parallel, optimizer: GuidedUpdates) -> Self:
        """Copy what steps change."""
        with BounceBuffers() as buffers:
            values = [buffers.get(each.local) for each in parallel.owned]
            states = [
                _State(held, {key: _copied(value, buffers) for key, value in held.items()})
                for part, places in optimizer.parts(parallel.owned)
                for each in places
                for held in [part.state[each.parameter]]
            ]
        return cls(parallel, optimizer, values, states)

    @torch.no_grad()
    def restore(self) -> None:
        """Make everything what it was."""
        with BounceBuffers() as buffers:
            for each, value in zip(self._parallel.owned, self._values, strict=True):
                buffers.put(each.local, value)
            for held, copied in self._states:
                for key in held.keys() - copied.keys():
                    del held[key]
                for key, value in copied.items():
                    if isinstance(value, torch.Tensor):
                        buffers.put(local_part(held[key]), value)
                    else:
                        held[key] = value
        for name, buffer in self._parallel.module.named_buffers():
            buffer.copy_(self._buffers[name])
        set_random_state(self._random)
        self._optimizer.steps = self._steps
        self._parallel.zero_grad()
        self._parallel.changed()


def _copied(value: Any, buffers: BounceBuffers) -> Any:
    return buffers.get(local_part(value)) if isinstance(value, torch.Tensor) else value
