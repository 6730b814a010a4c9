"""The data of a pipeline's step, and the messages between its stages.

Sends and receives only begin at their place in the program, and run beside the next action. The first hidden
state for inputs of a new kind comes after a header, which says its form. A rank that expects a header begins
the hidden state's receive before its next transfer with the same peer, or before the forward that needs it.
So every wait is for an earlier transfer, and both ranks keep one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from shoal.parallel.communication import Axis, Pending
from shoal.parallel.micro_batches import kind_of, next_of
from shoal.parallel.pipeline.stage_chain import Form, StageChain
from shoal.spec.plan.schedules import Action, Payload, Receive, Send

MicroBatch = tuple[Any, Tensor]
"""The model's input, and the targets of its output."""

_MOST_UNSENT = 4  # unfinished messages before a wait for the oldest: they hold memory


@final
class StepData:
    """The micro-batches of a step, each kept from its first forward on this rank to its last."""

    def __init__(self, source: Iterator[MicroBatch], uses: int) -> None:
        self._source = source
        self._uses = uses
        self._held: dict[int, tuple[MicroBatch, int]] = {}
        self._kinds: list[Hashable] = []

    def kind(self, number: int) -> Hashable:
        """Return the `kind_of` the model's inputs of one micro-batch."""
        self._fetch(number)
        return self._kinds[number]

    def use(self, number: int) -> MicroBatch:
        """Return one micro-batch, and drop it with the last of its uses."""
        self._fetch(number)
        micro_batch, left = self._held.pop(number)
        if left > 1:
            self._held[number] = micro_batch, left - 1
        return micro_batch

    def _fetch(self, number: int) -> None:
        while len(self._kinds) <= number:
            micro_batch = next_of(self._source, len(self._kinds))
            self._held[len(self._kinds)] = micro_batch, self._uses
            self._kinds.append(kind_of(micro_batch[0]))


_Key = tuple[Payload, int, int]
"""The content of a message, the stage that waits for it, and the micro-batch."""


@dataclass(frozen=True, slots=True)
class _Announced:
    """A hidden state that a rank will receive once it has the header."""

    step: Receive
    kind: Hashable
    header: Tensor
    pending: Pending


@final
class Messages:
    """The messages of one step between this rank's stages and the others.

    Args:
        chain: The stages, which know the forms of what they receive.
        placement: By stage, the index along the axis of the rank that holds it.
        axis: The ranks that hold the stages.
        device: Device of the stages.
        kind: Gives the kind of the model's inputs of a micro-batch.
    """

    def __init__(
        self,
        chain: StageChain,
        placement: Sequence[int],
        axis: Axis,
        device: torch.device,
        kind: Callable[[int], Hashable],
    ) -> None:
        self._chain = chain
        self._placement = placement
        self._axis = axis
        self._device = device
        self._kind = kind
        self._here: dict[_Key, Tensor] = {}
        self._forms: dict[tuple[int, int], Form] = {}  # of outputs, which their gradients have too
        self._coming: dict[_Key, tuple[Tensor, Pending]] = {}
        self._announced: dict[int, _Announced] = {}  # by peer
        self._going: deque[tuple[Tensor, Sequence[Pending]]] = deque()

    def put(self, payload: Payload, stage: int, microbatch: int, tensor: Tensor) -> None:
        """Keep a result of this rank for the stage that waits for it, on this rank or another."""
        self._here[payload, stage, microbatch] = tensor
        if payload is Payload.ACTIVATION:
            self._forms[stage - 1, microbatch] = Form.of(tensor)

    def take(self, payload: Payload, action: Action) -> Tensor:
        """Return the tensor for an action, received from another rank or made here."""
        key = payload, action.stage, action.microbatch
        if key in self._here:
            return self._here.pop(key)
        if key not in self._coming:
            self._take_announced(self._placement[action.stage - 1])
        tensor, pending = self._coming.pop(key)
        pending.wait()
        return tensor

    def begin_receive(self, step: Receive) -> None:
        """Begin a receive, or that of its header."""
        self._take_announced(step.peer)
        if step.payload is Payload.GRADIENT:
            self._receive(step, self._forms.pop((step.stage, step.microbatch)))
            return
        kind = self._kind(step.microbatch)
        form = self._chain.form(step.stage, kind)
        if form is None:
            self._announced[step.peer] = _Announced(step, kind, *self._chain.start_header(step.stage))
        else:
            self._receive(step, form)

    def begin_send(self, step: Send) -> None:
        """Begin to send what was put for the stage."""
        self._take_announced(step.peer)
        sent = self._here.pop((step.payload, step.target, step.microbatch)).contiguous()
        name = _name_of(step.payload, step.target, step.microbatch)
        if step.payload is Payload.GRADIENT:
            started = [self._axis.send(sent, step.peer, name)]
        else:
            started = self._chain.start_send(step.target, self._kind(step.microbatch), sent, name)
        self._going.append((sent, started))
        if len(self._going) > _MOST_UNSENT:
            self._finish_oldest_send()

    def finish_sends(self) -> None:
        """Wait until all sends are complete."""
        while self._going:
            self._finish_oldest_send()

    def _take_announced(self, peer: int) -> None:
        """Begin to receive the hidden state that a peer announces, if it does."""
        announced = self._announced.pop(peer, None)
        if announced is not None:
            announced.pending.wait()
            step = announced.step
            self._receive(step, self._chain.take_header(step.stage, announced.kind, announced.header))

    def _receive(self, step: Receive, form: Form) -> None:
        into = form.new(self._device)
        pending = self._axis.receive(into, step.peer, _name_of(step.payload, step.stage, step.microbatch))
        self._coming[step.payload, step.stage, step.microbatch] = into, pending

    def _finish_oldest_send(self) -> None:
        for pending in self._going.popleft()[1]:
            pending.wait()


def _name_of(payload: Payload, stage: int, microbatch: int) -> str:
    """Return a message's name, equal on both ranks: what is sent, and the action that waits for it."""
    what = "activation" if payload is Payload.ACTIVATION else "gradient"
    return f"{what}:{stage}{payload.value}{microbatch}"
