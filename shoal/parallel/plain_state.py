"""State of modules in Python attributes beside their buffers.

A module may keep numbers that belong to a buffer: dynamic rotary embeddings of transformers keep the longest
sequence that their frequencies are for. What restores a buffer has to restore these too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

__all__ = ["StageStates", "StateBefore", "StatesBefore", "plain_state", "restored"]

_Copy = tuple[Tensor, int, Tensor]
"""A buffer, its version, or -1 if that does not tell whether it changed, and a copy."""

StateBefore = tuple[nn.Module, Mapping[str, _Copy], Mapping[str, Any]]
"""A module, its buffers, and the numbers beside them."""


def plain_state(module: nn.Module) -> dict[str, Any]:
    """Return the numbers, texts and tensors that are attributes of a module with buffers of its own."""
    if not module._buffers:
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if name != "training"
        and not name.startswith("_")
        and (value is None or isinstance(value, bool | int | float | str | Tensor))
    }


@final
class StageStates:
    """The state of modules that several stages of a rank run, as each stage knows it.

    In a step each stage sees all micro-batches in order, and a rank's stages take turns. So a stage must not
    find what another one made of these modules: a longer micro-batch that its own forward has not reached.
    After the step all stages have made the same of them.

    Args:
        modules: The modules that all stages run.
        stages: Numbers of this rank's stages.
    """

    def __init__(self, modules: Iterable[nn.Module], stages: Iterable[int]) -> None:
        self._modules = [module for module in modules if module._buffers]
        self._stages = list(stages)
        self._of_stages: dict[int, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}

    def begin(self) -> None:
        """Give each stage the present state; call it before a step, and before a forward alone."""
        if len(self._stages) > 1:
            self._of_stages = {
                stage: [
                    ({name: _copied(each) for name, each in module._buffers.items()}, plain_state(module))
                    for module in self._modules
                ]
                for stage in self._stages
            }

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Run a forward of a stage within it."""
        if stage not in self._of_stages:
            yield
            return
        for module, (buffers, plain) in zip(self._modules, self._of_stages[stage], strict=True):
            module._buffers.update(buffers)
            vars(module).update(plain)
        yield
        self._of_stages[stage] = [(dict(module._buffers), plain_state(module)) for module in self._modules]


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
        """Return the present state of the modules that have buffers."""
        return [
            (
                module,
                {
                    name: self._copy(module, name, buffer)
                    for name, buffer in module._buffers.items()
                    if buffer is not None
                },
                plain_state(module),
            )
            for module in self._block.modules()
            if module._buffers
        ]

    def _copy(self, module: nn.Module, name: str, buffer: Tensor) -> _Copy:
        known = self._copies.get((module, name))
        if known is None or known[0] is not buffer or known[1] != buffer._version:
            # Kernels of batch norms change running statistics without a new version.
            version = -1 if getattr(module, "track_running_stats", False) else buffer._version
            known = self._copies[module, name] = (buffer, version, buffer.detach().clone())
        return known


@contextmanager
def restored(before: Sequence[StateBefore]) -> Iterator[None]:
    """Run a forward again within it, in a state that `StatesBefore` took; then the present state is back."""
    now = [(module, dict(module._buffers), plain_state(module)) for module, _, _ in before]
    for module, copies, plain in before:
        for name, (buffer, version, copy) in copies.items():
            if module._buffers.get(name) is not buffer or buffer._version != version:
                module._buffers[name] = copy.clone()  # another backward may want the copy again
        vars(module).update(plain)
    try:
        yield
    finally:
        for module, buffers, plain in now:
            module._buffers.update(buffers)
            vars(module).update(plain)


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()
