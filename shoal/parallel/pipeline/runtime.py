"""The pipeline's runtime: one loop that executes any schedule's table on the stages of a rank.

The table says which forward or backward comes next. Between its actions stand the sends and receives that
`transfers` derives from it, in an order that would complete even with blocking ones. Here both only begin at
their place, and run beside the next action: see `messages.py`. Autograd's state of a micro-batch is kept from
a stage's forward to its backward; of the output that is sent on, only its node in the graph is kept.

Gradients are reduced over the data-parallel ranks once a stage's last backward of the step is done and its
message is sent, while other stages still compute. zero2 and zero3 keep no whole sums, and reduce in every
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.parallel.communication import Axis
from shoal.parallel.data.strategy import Strategy
from shoal.parallel.loss_terms import require_no_terms_of_stage
from shoal.parallel.micro_batches import require_scalar
from shoal.parallel.pipeline.messages import Messages, MicroBatch, StepData
from shoal.parallel.pipeline.outputs import broadcast_output
from shoal.parallel.pipeline.split_backward import Deferral, WeightGradients, split_backward
from shoal.parallel.pipeline.stage_chain import StageChain
from shoal.parallel.pipeline.stages import Stage
from shoal.record import Recorder
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import Action, Payload, Receive, Send, Step, Times, Work, transfers
from shoal.spec.timeline import Kind

Loss = Callable[[Any, Tensor], Tensor]
"""A function from the model's output and the targets to the mean loss of a micro-batch."""


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
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._messages: Messages | None = None  # of the step that runs

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
            micro_batches: Micro-batches; each is taken when it is first needed. Their shapes may differ.
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
        data = StepData(micro_batches, len(self._stages))
        messages = self._messages = Messages(
            self._chain, self._plan.placement, self._axis, self._device, data.kind
        )
        next(iter(self._stages.values())).entry.stage.states.begin()
        for here in self._stages.values():
            here.strategy.start_step()  # otherwise each stage would start only after the stage before it
        total = torch.zeros((), device=self._device)
        due: list[Strategy] = []
        reducing: list[Strategy] = []
        for step in program.steps:
            if isinstance(step, Action):
                _start_reductions(due, reducing)
            if isinstance(step, Receive):
                messages.begin_receive(step)
            elif isinstance(step, Send):
                messages.begin_send(step)
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
        messages.finish_sends()
        for strategy in reducing:
            strategy.finish_reduction()
        self._add_up_twins()
        self._messages = None
        for here in self._stages.values():
            here.strategy.call_hooks()
        return total

    def forward(self, inputs: Any) -> Any:
        """Return the model's output on the last stage's rank, None on others; without gradients."""
        return self._chain.forward(inputs)

    def broadcast(self, output: Any) -> Any:
        """Return the output of the last stage's rank on every rank of the axis; see `broadcast_output`."""
        return broadcast_output(output, self._plan.placement[-1], self._axis, self._device)

    def clear(self) -> None:
        """Forget the state of a step that an error ended."""
        self._messages = None
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
        here, messages = self._stages[action.stage], self._messages
        assert messages is not None
        entry = here.entry
        hidden = None if entry.stage.is_first else messages.take(Payload.ACTIVATION, action)
        if hidden is not None:
            hidden.requires_grad_()
        mode = nullcontext() if is_halved else here.plainly()
        with self._recorder.span(Kind.FORWARD, str(action)), mode:
            output: Tensor = entry(inputs, hidden)
            if entry.stage.is_last:
                given, output = output, loss(output)
                assert hidden is not None
                require_no_terms_of_stage(output, given, hidden)
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._kept[action.stage, action.microbatch] = _Kept(hidden, edge)
        if entry.stage.is_last:
            total.add_(output.detach())
        else:
            messages.put(Payload.ACTIVATION, action.stage + 1, action.microbatch, output.detach())

    def _backward(self, action: Action, *, is_last: bool) -> None:
        """Run the whole backward, or its half for the input."""
        here, messages = self._stages[action.stage], self._messages
        assert messages is not None
        kept = self._kept.pop((action.stage, action.microbatch))
        gradient = None if here.entry.stage.is_last else messages.take(Payload.GRADIENT, action)
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
            if received is None:
                received = torch.zeros_like(kept.hidden)
            messages.put(Payload.GRADIENT, action.stage - 1, action.microbatch, received)
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


def _start_reductions(due: list[Strategy], reducing: list[Strategy]) -> None:
    for strategy in due:
        strategy.start_reduction()
    reducing += due
    due.clear()


def _share_of_loss(loss: Loss, targets: Tensor, mean_of: float, output: Any) -> Tensor:
    return require_scalar(loss(output, targets)) / mean_of
