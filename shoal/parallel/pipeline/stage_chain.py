"""One micro-batch through a pipeline's stages, one after another, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from shoal.errors import ModelError
from shoal.parallel.communication import Axis, Pending
from shoal.parallel.micro_batches import kind_of
from shoal.parallel.pipeline.stages import Stage

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 10  # numbers that describe a form: the type, the number of dims, and up to eight dims
_MOST_FORMS = 4096  # forms that are remembered for a stage


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and type of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

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

    The form of what a stage receives follows from the kind of the model's inputs (`kind_of`). A header comes
    before the first message of a kind; after that both sides know the form.

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
        self._forms: dict[int, dict[Hashable, Form]] = {number: {} for number in range(len(placement))}

    @torch.no_grad()
    def forward(self, inputs: Any) -> Any:
        """Return the output on the last stage's rank, None on others; all ranks of the axis call it."""
        next(iter(self._entries.values())).stage.states.begin()
        passed: Any = None
        kind = kind_of(inputs)
        for number, entry in sorted(self._entries.items()):
            if number > 0 and self._placement[number - 1] != self._axis.index:
                passed = self._receive(number, kind)
            passed = entry(inputs, passed)
            after = number + 1
            if after < len(self._placement) and self._placement[after] != self._axis.index:
                for pending in self.start_send(after, kind, passed.contiguous(), f"activation:{after}"):
                    pending.wait()
                passed = None
        return passed

    def form(self, number: int, kind: Hashable) -> Form | None:
        """Return the form of what stage `number` receives for inputs of a kind; None if a header comes."""
        return self._forms[number].get(kind)

    def start_header(self, number: int) -> tuple[Tensor, Pending]:
        """Begin to receive the header of stage `number`, for `take_header`."""
        results = next(iter(self._entries.values())).stage.results
        header = torch.empty(_HEADER + len(results), dtype=torch.int64, device=self._device)
        return header, self._axis.receive(header, self._placement[number - 1], f"form:{number}")

    def take_header(self, number: int, kind: Hashable, header: Tensor) -> Form:
        """Return the form in a header; the stage learns what the parts of earlier stages give."""
        self._entries[number].stage.learn(header[_HEADER:].tolist())
        form = _form_of(header[:_HEADER])
        self._keep(number, kind, form)
        return form

    def start_send(self, number: int, kind: Hashable, output: Tensor, name: str) -> list[Pending]:
        """Begin to send a contiguous output to stage `number`, after a header if the kind is new.

        Raises:
            ModelError: The output has another form than for earlier inputs of the same kind.
        """
        peer, form, known = self._placement[number], Form.of(output), self.form(number, kind)
        started = []
        if known is None:
            stage = self._entries[number - 1].stage
            header = torch.cat([_described(form), torch.tensor(stage.results, dtype=torch.int64)])
            started.append(self._axis.send(header.to(self._device), peer, f"form:{number}"))
            self._keep(number, kind, form)
        elif known != form:
            raise ModelError(
                f"stage {number - 1} gives a hidden state {list(form.shape)} of {form.dtype}, and gave "
                f"{list(known.shape)} of {known.dtype} for inputs of the same shapes, types and numbers",
                possible="hidden states whose shape follows from the shapes of the model's inputs",
                change="let the shape depend on no values in tensors, or use pp=1",
            )
        return [*started, self._axis.send(output, peer, name)]

    def _receive(self, number: int, kind: Hashable) -> Tensor:
        form = self.form(number, kind)
        if form is None:
            header, pending = self.start_header(number)
            pending.wait()
            form = self.take_header(number, kind, header)
        hidden = form.new(self._device)
        self._axis.receive(hidden, self._placement[number - 1], f"activation:{number}").wait()
        return hidden

    def _keep(self, number: int, kind: Hashable, form: Form) -> None:
        forms = self._forms[number]
        if len(forms) == _MOST_FORMS:
            forms.clear()  # at the same message on both sides
        forms[kind] = form


def _described(form: Form) -> Tensor:
    numbers = [_DTYPES.index(form.dtype), len(form.shape), *form.shape]
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def _form_of(header: Tensor) -> Form:
    dtype, dims, *shape = header.tolist()
    return Form(tuple(shape[:dims]), _DTYPES[dtype])
