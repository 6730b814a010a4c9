"""State of modules that no `state_dict` tells of: Python attributes, beside buffers.

A module may keep numbers that belong to a buffer: dynamic rotary embeddings of transformers keep the longest
sequence that their frequencies are for. Others keep tables that are no buffers, counts of their calls, or a
running mean. What restores a buffer has to restore these too, under whatever name and in whatever list.

Parameters, modules and other objects are not such state, nor are tensors with a graph: results of a forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_CONTAINERS = (dict, list, tuple, set, deque)
_MOST = 1024  # elements of a container; a larger one is a table, such as a vocabulary, and left as it is
_DEEPEST = 4  # containers within each other


@dataclass(frozen=True, slots=True)
class _Content:
    """A container, and what was in it."""

    container: Any
    held: Any


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor, its version, or -1 if that does not tell whether it changed, and a copy.

    The copy is the tensor itself for an attribute that each forward sets to another tensor.
    """

    tensor: Tensor
    version: int
    copy: Tensor

    def value(self) -> Tensor:
        """Return a tensor with the value that the copy was made of."""
        is_as_before = self.tensor._version == self.version or self.copy is self.tensor
        return self.tensor if is_as_before else self.copy.clone()  # another backward may want the copy again


StateBefore = tuple[nn.Module, Mapping[str, _Copy], Mapping[str, Any]]
"""A module, its buffers, and its attributes."""


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are state, for `put_back`: plain values, containers, tensors."""
    return {
        name: _taken(value)
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and _is_state(value)
    }


def put_back(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Give a module the `attributes` that it had, and remove those that it got since; in place."""
    own = vars(module)
    for name in [name for name in own if name not in before and name not in _OF_EVERY_MODULE]:
        if _is_state(own[name]):
            del own[name]
    own.update((name, _given(taken)) for name, taken in before.items())


def is_changed(module: nn.Module, before: Mapping[str, Any]) -> bool:
    """Return whether attributes of a module, except tensors, are other ones than those before."""
    now = attributes(module)
    if before.keys() != now.keys():
        return True
    return any(
        _differ(taken, now[name])
        for name, taken in before.items()
        if not (isinstance(taken, Tensor) and isinstance(now[name], Tensor))
    )


def _is_state(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    return value is None or isinstance(value, (_PLAIN, _CONTAINERS))


def _taken(value: Any, depth: int = 0) -> Any:
    """Return a value, with the content of containers, so that `_given` can undo changes in place."""
    if not isinstance(value, _CONTAINERS) or len(value) > _MOST or depth == _DEEPEST:
        return value
    if isinstance(value, dict):
        return _Content(value, {key: _taken(each, depth + 1) for key, each in value.items()})
    if any(isinstance(each, nn.Parameter | nn.Module) for each in value):  # as recurrent layers list weights
        return value
    return _Content(
        value, set(value) if isinstance(value, set) else [_taken(each, depth + 1) for each in value]
    )


def _given(taken: Any) -> Any:
    if isinstance(taken, _Copy):
        return taken.value()
    if not isinstance(taken, _Content):
        return taken
    container, held = taken.container, taken.held
    if isinstance(held, dict):
        content: Any = {key: _given(each) for key, each in held.items()}
    else:
        content = held if isinstance(held, set) else [_given(each) for each in held]
    if isinstance(container, tuple) or not _differ(taken, _taken(container)):
        return container
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)
    return container


def _differ(one: Any, other: Any) -> bool:
    """Return whether two taken values are other objects, or differ as numbers and texts."""
    if isinstance(one, _Content) and isinstance(other, _Content):
        if one.container is not other.container or len(one.held) != len(other.held):
            return True
        if isinstance(one.held, set):
            return bool(one.held != other.held)
        if isinstance(one.held, dict):
            return one.held.keys() != other.held.keys() or any(
                _differ(each, other.held[key]) for key, each in one.held.items()
            )
        return any(map(_differ, one.held, other.held))
    return one is not other and not (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


@final
class StageStates:
    """The state of modules that several stages of a rank run, as each stage knows it.

    In a step each stage sees all micro-batches in order, and a rank's stages take turns. So a stage must not
    find what another one made of these modules: a longer micro-batch that its own forward has not reached.
    After the step all stages have made the same of them. What callers set between forwards, such as the keys
    of dropout, is for all stages.

    Args:
        modules: The modules that all stages run.
        stages: Numbers of this rank's stages.
    """

    def __init__(self, modules: Iterable[nn.Module], stages: Iterable[int]) -> None:
        self._modules = list(modules)
        self._stages = list(stages)
        self._of_stages: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        self._left: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Give each stage the present state; call it before a step, and before a forward alone."""
        if len(self._stages) > 1:
            self._left = [attributes(module) for module in self._modules]
            self._of_stages = {
                stage: [(_copied(module._buffers), _copied(attributes(module))) for module in self._modules]
                for stage in self._stages
            }

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Run a forward of a stage within it."""
        if stage not in self._of_stages:
            yield
            return
        self._take_what_was_set()
        for module, (buffers, plain) in zip(self._modules, self._of_stages[stage], strict=True):
            module._buffers.update(buffers)
            put_back(module, plain)
        yield
        self._left = [attributes(module) for module in self._modules]
        self._of_stages[stage] = [
            (dict(module._buffers), dict(plain))
            for module, plain in zip(self._modules, self._left, strict=True)
        ]

    def _take_what_was_set(self) -> None:
        for number, (module, left) in enumerate(zip(self._modules, self._left, strict=True)):
            now = attributes(module)
            was_set = {name: now[name] for name in now if name not in left or _differ(left[name], now[name])}
            for states in self._of_stages.values():
                states[number][1].update(was_set)


@final
class StatesBefore:
    """The state of a block's modules before each of its forwards, with which a forward is run again.

    The second run then computes what the first one did, and changes nothing: running statistics count a
    micro-batch once, and a spectral norm has the vectors that it had. A buffer that does not change is copied
    once.

    Args:
        block: The block, to which modules may be added later.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._copies: dict[tuple[nn.Module, str], _Copy] = {}

    def take(self) -> list[StateBefore]:
        """Return the present state of the modules."""
        return [
            (
                module,
                {
                    name: self._copy(module, name, buffer)
                    for name, buffer in module._buffers.items()
                    if buffer is not None
                },
                {
                    name: self._copy(module, name, value) if isinstance(value, Tensor) else value
                    for name, value in attributes(module).items()
                },
            )
            for module in self._block.modules()
        ]

    def _copy(self, module: nn.Module, name: str, tensor: Tensor) -> _Copy:
        known = self._copies.get((module, name))
        if known is None or known.tensor is not tensor or known.version != tensor._version:
            # Kernels of batch norms change running statistics without a new version.
            version = -1 if getattr(module, "track_running_stats", False) else tensor._version
            is_anew = known is not None and known.tensor is not tensor and name not in module._buffers
            copy = tensor if is_anew else tensor.detach().clone()
            known = self._copies[module, name] = _Copy(tensor, version, copy)
        return known


@contextmanager
def restored(before: Sequence[StateBefore]) -> Iterator[None]:
    """Run a forward again within it, in a state that `StatesBefore` took; then the present state is back."""
    now = [(module, dict(module._buffers), dict(vars(module)), attributes(module)) for module, _, _ in before]
    for module, buffers, plain in before:
        module._buffers.update((name, copy.value()) for name, copy in buffers.items())
        put_back(module, plain)
    try:
        yield
    finally:
        for module, present, own, plain in now:
            module._buffers.update(present)
            put_back(module, plain)
            vars(module).update((name, own[name]) for name in own if name not in _OF_EVERY_MODULE)


@torch.inference_mode(False)  # a copy made within it could not be trained with later
def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each.clone() if isinstance(each, Tensor) else each for name, each in state.items()}
