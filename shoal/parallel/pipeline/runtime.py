"""The pipeline's runtime: one loop that executes any schedule's table on the stages of a rank.

The table says which forward or backward comes next. Between its actions stand the sends and receives that
`transfers` derives from it, in an order that would complete even with blocking ones. Here both only begin at
their place, and run beside the next action. Autograd's state of a micro-batch is kept from a stage's forward
to its backward; of the output that is sent on, only its node in the graph is kept.

Shapes are exchanged once: before the first step a forward without data goes through the stages. After that
both sides of each boundary know the shape of its messages.

Gradients are reduced over the data-parallel ranks once a stage's last backward of the step is done and its
message is sent, while other stages still compute. zero2 and zero3 keep no whole sums, and reduce in every
backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.parallel.communication import Axis, Pending
from shoal.parallel.data.strategy import Strategy
from shoal.parallel.pipeline.deferred import Deferral, WeightGradients, split_backward
from shoal.parallel.pipeline.stage_chain import StageChain
from shoal.parallel.pipeline.stages import Stage
from shoal.plan import Plan
from shoal.plan.schedules import Action, Payload, Receive, Send, Step, Times, Work, transfers
from shoal.record import Recorder
from shoal.timeline import Kind

__all__ = ["Loss", "MicroBatch", "Pipeline", "StageEntry", "StageHere"]

MicroBatch = tuple[Any, Tensor]
"""The model's input, and the targets of its output."""

Loss = Callable[[Any, Tensor], Tensor]
"""A function from the model's output and the targets to the mean loss of a micro-batch."""

_MOST_UNSENT = 4  # unfinished messages before a wait for the oldest: they hold memory


@final
class StageEntry(nn.Module):
    """A stage as a module with its own forward; several stages share the model's.

    Args:
        stage: The stage.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Any, hidden: Tensor | None = None) -> Any:
        """See `Stage`."""
        return self.stage(inputs, hidden)


@dataclass(frozen=True, slots=True)
class StageHere:
    """A stage of this rank.

    Attributes:
        entry: The module that runs the stage.
        strategy: The strategy that shares its states among data-parallel ranks.
        deferral: Where its layers defer the gradients of weights; None if no backward is in two halves.
    """

    entry: StageEntry
    strategy: Strategy
    deferral: Deferral | None

    def plainly(self) -> AbstractContextManager[None]:
        """Defer nothing within it: for a forward whose backward is not in two halves."""
        return nullcontext() if self.deferral is None else self.deferral.off()


@dataclass(slots=True)
class _Kept:
    """A micro-batch's data that a stage keeps from its forward to the end of its backward."""

    hidden: Tensor | None
    output: GradientEdge | None
    weights: WeightGradients | None = None


@final
class _Data:
    """The micro-batches of a step, each kept from its first forward on this rank to its last."""

    def __init__(self, source: Iterator[MicroBatch], uses: int) -> None:
        self._source = source
        self._uses = uses
        self._held: dict[int, tuple[MicroBatch, int]] = {}
        self._taken = 0

    def peek(self) -> Any:
        """Return the model's input of the first micro-batch."""
        self._fetch(0)
        return self._held[0][0][0]

    def use(self, number: int) -> MicroBatch:
        """Return one micro-batch, and drop it with the last of its uses."""
        self._fetch(number)
        micro_batch, left = self._held.pop(number)
        if left > 1:
            self._held[number] = micro_batch, left - 1
        return micro_batch

    def _fetch(self, number: int) -> None:
        while self._taken <= number:
            self._held[self._taken] = next(self._source), self._uses
            self._taken += 1


_Key = tuple[Payload, int, int]
"""The content of a message, the stage that waits for it, and the micro-batch."""


@dataclass(frozen=True, slots=True)
class _Program:
    """The work of this rank in a step of a number of micro-batches.

    Attributes:
        steps: The steps, in order.
        last: By stage, the last action that adds to the gradients of its weights.
        halved: Stages and micro-batches whose backward is in two halves.
    """

    steps: Sequence[Step]
    last: dict[int, Action]
    halved: frozenset[tuple[int, int]]


@final
class Pipeline:
    """Execute a Plan's schedule on this rank.

    Args:
        plan: A Plan with pp > 1.
        stages: The stages that the schedule places on this rank.
        times: Times of each stage of the whole pipeline, for a schedule that is found from them.
        axis: The ranks that hold the other stages of the same samples.
        recorder: Recorder of spans.
        device: Device of the stages.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[StageHere],
        times: Times,
        axis: Axis,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._times = times
        self._stages = {here.entry.stage.index: here for here in stages}
        entries = {number: here.entry for number, here in self._stages.items()}
        self._chain = StageChain(plan.placement, entries, axis, device)
        self._axis = axis
        self._recorder = recorder
        self._device = device
        self._programs: dict[int, _Program] = {}
        self._here: dict[_Key, Tensor] = {}
        self._coming: dict[_Key, tuple[Tensor, Pending]] = {}
        self._going: deque[tuple[Tensor, Pending]] = deque()
        self._kept: dict[tuple[int, int], _Kept] = {}

    def run(
        self,
        micro_batches: Iterator[MicroBatch],
        count: int,
        loss: Loss,
        prepare: Callable[[int, Any], None] = lambda number, inputs: None,
        *,
        mean_of: float,
    ) -> Tensor:
        """Run forward and backward of all micro-batches of a step.

        Args:
            micro_batches: Micro-batches of equal size; each is taken when it is first needed.
            count: Number of micro-batches to take.
            loss: See `Loss`.
            prepare: Called before each forward with the micro-batch's number and the model's input.
            mean_of: Number by which the sum of the micro-batches' losses is divided.

        Returns:
            The sum of all losses over `mean_of`; 0 on a rank without the last stage.

        Raises:
            PlanError: The schedule cannot be made for this number of micro-batches.
        """
        self.clear()
        program = self._program_for(count)
        data = _Data(micro_batches, len(self._stages))
        forms = self._chain.forms(data.peek())
        for here in self._stages.values():
            here.strategy.start_step()  # otherwise each stage would start only after the stage before it
        total = torch.zeros((), device=self._device)
        due: list[Strategy] = []
        reducing: list[Strategy] = []
        for step in program.steps:
            if isinstance(step, Action):
                _start_reductions(due, reducing)
            if isinstance(step, Receive):
                stage = step.stage if step.payload is Payload.ACTIVATION else step.stage + 1
                self._begin_receive(step, forms[stage].new(self._device))
            elif isinstance(step, Send):
                self._begin_send(step)
            elif step.work is Work.FORWARD:
                inputs, targets = data.use(step.microbatch)
                prepare(step.microbatch, inputs)
                share = partial(_share_of_loss, loss, targets, mean_of)
                is_halved = (step.stage, step.microbatch) in program.halved
                self._forward(step, inputs, share, total, is_halved=is_halved)
            else:
                is_last = program.last[step.stage] == step
                if step.work is Work.WEIGHT:
                    self._weight_gradients(step, is_last=is_last)
                else:
                    self._backward(step, is_last=is_last)
                strategy = self._stages[step.stage].strategy
                if is_last and strategy.keeps_sums:
                    due.append(strategy)
        _start_reductions(due, reducing)
        while self._going:
            self._going.popleft()[1].wait()
        for strategy in reducing:
            strategy.finish_reduction()
        self._add_up_twins()
        for here in self._stages.values():
            here.strategy.call_hooks()
        return total

    def forward(self, inputs: Any) -> Any:
        """Return the model's output on the last stage's rank, None on others; without gradients."""
        return self._chain.forward(inputs)

    def broadcast(self, output: Any) -> Tensor:
        """Return a tensor of the last stage's rank on every rank of the axis; other ranks pass None."""
        return self._chain.broadcast(output)

    def clear(self) -> None:
        """Forget the state of a step that an error ended."""
        self._here.clear()
        self._coming.clear()
        self._going.clear()
        self._kept.clear()

    def _program_for(self, count: int) -> _Program:
        if count not in self._programs:
            schedule = self._plan.schedule_for(count, self._times)
            row = schedule.table[self._axis.index]
            last = {action.stage: action for action in row if action.work in (Work.BACKWARD, Work.WEIGHT)}
            halved = frozenset((each.stage, each.microbatch) for each in row if each.work is Work.WEIGHT)
            self._programs[count] = _Program(transfers(schedule, ahead=1)[self._axis.index], last, halved)
        return self._programs[count]

    def _add_up_twins(self) -> None:
        """Sum the gradients of parameters that the first and the last stage share; each has its own part."""
        for here in self._stages.values():
            for owned in here.strategy.owned:
                gradient = owned.gradient
                if owned.family.tied_ranks is not None and gradient is not None:
                    owned.family.tied_ranks.all_reduce(gradient, owned.name).wait()

    # -- actions ------------------------------------------------------------------------------------

    def _forward(
        self, action: Action, inputs: Any, loss: Callable[[Any], Tensor], total: Tensor, *, is_halved: bool
    ) -> None:
        """Run a forward; on the last stage add the micro-batch's part of the loss to the total."""
        here = self._stages[action.stage]
        entry = here.entry
        hidden = None if entry.stage.is_first else self._take(Payload.ACTIVATION, action)
        if hidden is not None:
            hidden.requires_grad_()
        mode = nullcontext() if is_halved else here.plainly()
        with self._recorder.span(Kind.FORWARD, str(action)), mode:
            output: Tensor = entry(inputs, hidden)
            if entry.stage.is_last:
                output = loss(output)
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._kept[action.stage, action.microbatch] = _Kept(hidden, edge)
        if entry.stage.is_last:
            total.add_(output.detach())
        else:
            self._here[Payload.ACTIVATION, action.stage + 1, action.microbatch] = output.detach()

    def _backward(self, action: Action, *, is_last: bool) -> None:
        """Run the whole backward, or its half for the input."""
        here = self._stages[action.stage]
        kept = self._kept.pop((action.stage, action.microbatch))
        gradient = None if here.entry.stage.is_last else self._take(Payload.GRADIENT, action)
        is_whole = action.work is Work.BACKWARD
        with self._recorder.span(Kind.BACKWARD, str(action)):
            if is_whole:
                with here.plainly(), self._reducing(action.stage, is_last=is_last):
                    if kept.output is not None:
                        torch.autograd.backward([kept.output], [gradient])
            else:
                assert here.deferral is not None
                with self._held():
                    kept.weights = split_backward(here.deferral, kept.output, gradient)
            kept.output = None  # frees the graph, which is part of a backward
        if kept.hidden is not None:
            received = kept.hidden.grad
            self._here[Payload.GRADIENT, action.stage - 1, action.microbatch] = (
                torch.zeros_like(kept.hidden) if received is None else received
            )
        if not is_whole:
            kept.hidden = None
            self._kept[action.stage, action.microbatch] = kept

    def _weight_gradients(self, action: Action, *, is_last: bool) -> None:
        kept = self._kept.pop((action.stage, action.microbatch))
        assert kept.weights is not None
        with self._recorder.span(Kind.BACKWARD, str(action)), self._reducing(action.stage, is_last=is_last):
            kept.weights.run()

    @contextmanager
    def _reducing(self, stage: int, *, is_last: bool) -> Iterator[None]:
        """Reduce the stage's gradients in backward within it, if its strategy keeps no sums of them."""
        strategy = self._stages[stage].strategy
        with ExitStack() as stack:
            stack.enter_context(self._held(but=None if strategy.keeps_sums else stage))
            stack.enter_context(nullcontext() if is_last else strategy.accumulate())
            yield

    @contextmanager
    def _held(self, but: int | None = None) -> Iterator[None]:
        """Reduce no gradients in backward within it, except those of one stage."""
        with ExitStack() as stack:
            for number, here in self._stages.items():
                if number != but:
                    stack.enter_context(here.strategy.hold())
            yield

    # -- messages -----------------------------------------------------------------------------------

    def _begin_receive(self, step: Receive, into: Tensor) -> None:
        pending = self._axis.receive(into, step.peer, _name_of(step.payload, step.stage, step.microbatch))
        self._coming[step.payload, step.stage, step.microbatch] = into, pending

    def _begin_send(self, step: Send) -> None:
        sent = self._here.pop((step.payload, step.target, step.microbatch)).contiguous()
        name = _name_of(step.payload, step.target, step.microbatch)
        self._going.append((sent, self._axis.send(sent, step.peer, name)))
        if len(self._going) > _MOST_UNSENT:
            self._going.popleft()[1].wait()

    def _take(self, payload: Payload, action: Action) -> Tensor:
        """Return the tensor for an action, received from another rank or made here."""
        key = payload, action.stage, action.microbatch
        if key in self._here:
            return self._here.pop(key)
        tensor, pending = self._coming.pop(key)
        pending.wait()
        return tensor


def _name_of(payload: Payload, stage: int, microbatch: int) -> str:
    """Return a message's name, equal on both ranks: what is sent, and the action that waits for it."""
    what = "activation" if payload is Payload.ACTIVATION else "gradient"
    return f"{what}:{stage}{payload.value}{microbatch}"


def _start_reductions(due: list[Strategy], reducing: list[Strategy]) -> None:
    for strategy in due:
        strategy.start_reduction()
    reducing += due
    due.clear()


def _share_of_loss(loss: Loss, targets: Tensor, mean_of: float, output: Any) -> Tensor:
    return loss(output, targets) / mean_of
