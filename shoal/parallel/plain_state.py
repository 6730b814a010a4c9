"""State of modules in Python attributes beside their buffers.

A module may keep numbers that belong to a buffer: dynamic rotary embeddings of transformers keep the longest
sequence that their frequencies are for. What restores a buffer has to restore these too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

__all__ = ["StageStates", "plain_state"]


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


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()
