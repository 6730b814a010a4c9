"""One micro-batch through a pipeline's stages, one after another, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.parallel.communication import Axis
from shoal.parallel.pipeline.stages import Stage

__all__ = ["Entry", "Form", "StageChain"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 10  # numbers that describe a form: the type, the number of dims, and up to eight dims


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and type of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def new(self, device: torch.device) -> Tensor:
        """Return a tensor of this form, with undefined content."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Entry(Protocol):
    """Run a stage, with whatever else belongs to its forward.

    Attributes:
        stage: The stage.
    """

    stage: Stage

    @property
    def __call__(self) -> Callable[..., Any]:
        """Return a function from the model's input and the stage's hidden state to the stage's output."""


@final
class StageChain:
    """The stages in order, of which this rank runs its own.

    Args:
        placement: By stage, the index along the axis of the rank that holds it.
        entries: Entries of this rank's stages, by number.
        axis: The ranks that hold the stages.
        device: Device of the stages.
    """

    def __init__(
        self, placement: Sequence[int], entries: Mapping[int, Entry], axis: Axis, device: torch.device
    ) -> None:
        self._placement = placement
        self._entries = entries
        self._axis = axis
        self._device = device
        self._forms: dict[tuple[torch.Size, ...], dict[int, Form]] = {}

    @torch.no_grad()
    def forward(self, inputs: Any) -> Any:
        """Return the output on the last stage's rank, None on others; all ranks of the axis call it."""
        shapes = _shapes_of(inputs)
        known = self._forms.get(shapes)
        met = {} if known is None else known
        passed: Any = None
        for number, entry in sorted(self._entries.items()):
            if number > 0 and self._placement[number - 1] != self._axis.index:
                if known is None:
                    met[number] = self._be_told(number, entry.stage)
                passed = self._receive(number, met[number])
            passed = entry(inputs, passed)
            if number + 1 < len(self._placement):
                met.setdefault(number + 1, Form(tuple(passed.shape), passed.dtype))
                if self._placement[number + 1] != self._axis.index:
                    if known is None:
                        self._tell(number + 1, met[number + 1], entry.stage)
                    self._send(number + 1, passed)
                    passed = None
        self._forms[shapes] = met
        return passed

    def forms(self, inputs: Any) -> Mapping[int, Form]:
        """Return the form of each stage's input, by number, for the stages on either side of this rank's.

        For inputs of new shapes the stages are run once, by all ranks of the axis.
        """
        if _shapes_of(inputs) not in self._forms:
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), _kept_buffers(self._entries.values()):
                self.forward(inputs)
        return self._forms[_shapes_of(inputs)]

    def broadcast(self, output: Any) -> Tensor:
        """Return the tensor of the last stage's rank, on every rank of the axis."""
        holder = self._placement[-1]
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)
        if self._axis.index == holder:
            header.copy_(_described(Form(tuple(output.shape), output.dtype)))
        self._axis.broadcast(header, "form", source=holder).wait()
        whole = output.contiguous() if self._axis.index == holder else _form_of(header).new(self._device)
        self._axis.broadcast(whole, "output", source=holder).wait()
        return whole

    def _be_told(self, number: int, stage: Stage) -> Form:
        """Receive the form of a stage's input; the stage learns what the parts of earlier stages give."""
        header = torch.empty(_HEADER + len(stage.results), dtype=torch.int64, device=self._device)
        self._axis.receive(header, self._placement[number - 1], f"form:{number}").wait()
        stage.learn(header[_HEADER:].tolist())
        return _form_of(header[:_HEADER])

    def _tell(self, number: int, form: Form, stage: Stage) -> None:
        """Tell the rank of stage `number` what `_be_told` returns there."""
        header = torch.cat([_described(form), torch.tensor(stage.results, dtype=torch.int64)])
        self._axis.send(header.to(self._device), self._placement[number], f"form:{number}").wait()

    def _receive(self, number: int, form: Form) -> Tensor:
        hidden = form.new(self._device)
        self._axis.receive(hidden, self._placement[number - 1], f"activation:{number}").wait()
        return hidden

    def _send(self, number: int, output: Tensor) -> None:
        self._axis.send(output.contiguous(), self._placement[number], f"activation:{number}").wait()


@contextmanager
def _kept_buffers(entries: Iterable[Entry]) -> Iterator[None]:
    """Restore buffers after a forward within it, such as the statistics of a batch norm."""
    modules = {module for entry in entries for module in entry.stage.module.modules()}
    before = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for module, name, buffer, values in before:
        buffer.copy_(values)
        module._buffers[name] = buffer


def _shapes_of(inputs: Any) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


def _described(form: Form) -> Tensor:
    numbers = [_DTYPES.index(form.dtype), len(form.shape), *form.shape]
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def _form_of(header: Tensor) -> Form:
    dtype, dims, *shape = header.tolist()
    return Form(tuple(shape[:dims]), _DTYPES[dtype])
