"""A model laid over the ranks, as the one who trains it sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn

from shoal.errors import TrainingError
from shoal.models import logits_of
from shoal.models.dropout import Dropout, token_keys
from shoal.models.experts import set_auxiliary_scale
from shoal.parallel.axes import Axes
from shoal.parallel.bucket import Frozen, Owned
from shoal.parallel.layout import Cut
from shoal.parallel.pipeline import Loss, MicroBatch, Pipeline
from shoal.parallel.positions import local_sequence, residual_positions
from shoal.parallel.strategy import Strategy
from shoal.parallel.whole import Whole
from shoal.plan import Plan

__all__ = ["Parallel"]


@final
class Parallel:
    """A model laid over the ranks; `shoal.parallelize` makes one.

    Call it like the model. After `backward()` the gradients of `parameters()` are averages over all
    data-parallel ranks; after the optimizer's step the next call computes with the new weights.

    Attributes:
        module: The model. Its own parameters are up to date within `gathered()`.
        plan: The Plan that was applied; its `split` says how many blocks each pipeline stage has.
        axes: The groups that it communicates over.
        frozen: What this rank has of the parameters that are not trained.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        axes: Axes,
        strategies: Sequence[Strategy],
        *,
        whole: Whole,
        frozen: Sequence[Frozen],
        cuts: Mapping[str, Cut],
        pipeline: Pipeline | None = None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.axes = axes
        self.frozen = frozen
        self._whole = whole
        self._cuts = cuts
        self._strategies = strategies
        self._owned = [owned for strategy in strategies for owned in strategy.owned]
        self._pipeline = pipeline
        self._dtype = torch.bfloat16 if plan.precision == "bf16" else None
        self._has_dropout = hasattr(module, "dropout_keys") and any(
            isinstance(layer, Dropout) and layer.p > 0 for layer in module.modules()
        )
        self.set_micro_batches(1)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward; with precision=bf16, floating inputs are cast.

        In a pipeline it gives no gradients; the last stage gives its output, a tensor, to all ranks.

        Raises:
            TrainingError: Gradients were asked for in a pipeline.
        """
        if self._pipeline is not None and torch.is_grad_enabled():
            raise TrainingError(
                f"the Plan {self.plan} has a pipeline, whose forwards and backwards take turns: call "
                "forward_backward(...) in place of the model, or the model within torch.no_grad()"
            )
        if self._pipeline is not None:
            output = self.evaluate(*inputs, **named)
            return self._pipeline.broadcast(None if output is None else logits_of(output))
        return self._forward(*inputs, **named)

    @torch.no_grad()
    def evaluate(self, *inputs: Any, **named: Any) -> Any:
        """The model's output without gradients; in a pipeline where the last stage is, and None elsewhere."""
        if self._pipeline is None:
            return self._forward(*inputs, **named)
        return self._pipeline.forward(*map(self._cast, inputs))

    def forward_backward(
        self,
        micro_batches: Iterator[MicroBatch],
        count: int,
        loss: Loss,
        prepare: Callable[[int, Any], None] = lambda number, inputs: None,
    ) -> torch.Tensor:
        """Makes forward and backward of all micro-batches of a step, as the Plan's schedule orders them.

        Args:
            micro_batches: Pairs of what the model gets and the targets of its output.
            count: How many to take.
            loss: From the model's output and the targets to the mean loss of a micro-batch.
            prepare: Called before each forward with the micro-batch's number and what the model gets.

        Returns:
            The mean loss of this rank's micro-batches; in a pipeline 0 where the last stage is not.
        """
        self.set_micro_batches(count)
        if self._pipeline is not None:
            cast = ((self._cast(inputs), targets) for inputs, targets in micro_batches)
            return self._pipeline.run(cast, count, loss, prepare)
        total = torch.zeros((), device=next(self.module.parameters()).device)
        for number in range(count):
            inputs, targets = next(micro_batches)
            prepare(number, inputs)
            part = loss(self(inputs), targets) / count
            total += part.detach()
            with self.accumulate() if number + 1 < count else nullcontext():
                part.backward()
        return total

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        cast = {name: self._cast(value) for name, value in named.items()}
        return self.module(*map(self._cast, inputs), **cast)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What to give the optimizer: the part of each parameter that this rank owns, in fp32.

        Parts are flat where they are parts, so an optimizer must work element by element, as SGD and Adam do.
        """
        return (owned.parameter for owned in self.owned)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `parameters`, with the names of the whole parameters."""
        return ((owned.name, owned.parameter) for owned in self.owned)

    @property
    def owned(self) -> Sequence[Owned]:
        """What this rank owns, with where it lies in the whole parameters."""
        return self._owned

    def buffers_to_save(self) -> dict[str, torch.Tensor]:
        """The buffers of which this rank is the one to save them."""
        saved = self.module.state_dict()
        return {name: saved[name] for name in self._whole.buffers if name in self._whole.mine}

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """For all micro-batches of a step but the last: backward adds to the gradients.

        Replicated and ZeRO-1 communicate nothing within it.
        """
        with ExitStack() as stack:
            for strategy in self._strategies:
                stack.enter_context(strategy.accumulate())
            yield

    def set_micro_batches(self, number: int) -> None:
        """Says over how many micro-batches the caller averages the loss of a step; at first it is one.

        A model's auxiliary losses, such as a router's, begin their own backward, and are scaled alike. Where
        tensor parallelism splits the sequence, each rank adds its part of a sum to them.
        """
        split = self.axes.sequence.size // self.axes.cp.size
        set_auxiliary_scale(self.module, 1 / (number * split))

    def zero_grad(self) -> None:
        """Forgets all gradients, also those within a step that is given up between its micro-batches.

        After a whole step the optimizer's own `zero_grad` does as much.
        """
        if self._pipeline is not None:
            self._pipeline.clear()
        for strategy in self._strategies:
            strategy.clear()
        for owned in self.owned:
            owned.parameter.grad = None

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it, every parameter of `module` is up to date, and whole but for what tp and ep cut.

        All ranks enter it together.
        """
        with ExitStack() as stack:
            for strategy in self._strategies:
                stack.enter_context(strategy.gathered())
            yield

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model as `module.state_dict()` names it, under any Plan; all ranks call it together.

        A device holds one whole parameter at a time, rank 0's host all of them. Each is summed over all
        ranks, so this is for an export now and then, not for every step.

        Returns:
            On rank 0 copies on the CPU, of trained parameters in fp32, as the optimizer has them; on other
            ranks nothing.
        """
        keeps = self.axes.world.index == 0
        state = {}
        parts = self._whole.gather(self.module, self.owned, self.frozen, self._cuts, self.axes.world)
        for key, tensor in parts:
            if keeps:
                state[key] = tensor.to("cpu", copy=True)
        return state

    def changed(self) -> None:
        """To be called after owned parameters were changed other than after a backward."""
        for strategy in self._strategies:
            strategy.changed()

    def local(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a batch `[batch, ...]` that all ranks have.

        Raises:
            PlanError: The batch does not divide.
        """
        self.plan.replace(microbatch=None).with_microbatch_for(len(batch))
        return batch.chunk(self.axes.dp.size)[self.axes.dp.index]

    def local_sequence(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of `[batch, seq, ...]` along the sequence: what context parallelism cuts.

        Tokens and targets are cut alike, after targets were shifted.

        Raises:
            PlanError: The sequence does not divide.
        """
        return local_sequence(tensor, self.axes.cp, self.plan.context)

    def set_dropout(self, seed: int, samples: torch.Tensor, inputs: torch.Tensor) -> None:
        """Fixes the masks of dropout in the next forward, so that they do not depend on the layout.

        Only of models that take keys, as Shoal's do; in others dropout draws from torch's generator.

        Args:
            seed: Of the training.
            samples: Where the samples of the forward stand in all data, `[batch]`, int64.
            inputs: What the forward will get, `[batch, seq / cp]`.
        """
        if self._has_dropout:
            part = inputs.shape[1] * self.axes.cp.size // self.axes.sequence.size
            positions = residual_positions(part, self.axes, self.plan.context, samples.device)
            self.module.dropout_keys = token_keys(seed, 0, samples, positions)

    def gradient_norm(self) -> float:
        """The Euclidean norm of the whole averaged gradient; the same on every rank."""
        graded = [owned for owned in self.owned if owned.parameter.grad is not None]
        device = next(self.module.parameters()).device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if graded:
            norms = torch._foreach_norm([_gradient(owned) for owned in graded])
            each = torch.stack(list(norms)).double().square()
            copies = [owned.family.copies for owned in graded]
            if max(copies) > 1:
                each /= torch.tensor(copies, device=device)
            squares = each.sum()
        self.axes.parts.all_reduce(squares, "gradient norm").wait()
        return math.sqrt(squares.item())

    def clip_gradients(self, limit: float) -> float:
        """Scales the whole gradient down to the norm `limit` if it is above it.

        Returns:
            The norm before.
        """
        norm = self.gradient_norm()
        if norm > limit:
            gradients = [owned.parameter.grad for owned in self.owned if owned.parameter.grad is not None]
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def _cast(self, value: Any) -> Any:
        if self._dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._dtype)
        return value


def _gradient(owned: Owned) -> torch.Tensor:
    assert owned.parameter.grad is not None
    return owned.parameter.grad
