"""A rank's rows of a batch, and the loop over the micro-batches of a step, without a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ModelError, PlanError
from shoal.models.experts import mixtures_of, set_auxiliary_scale
from shoal.models.loss import LossFactor
from shoal.models.task import children_of, map_children, refuse_hidden, tensors_in
from shoal.parallel.communication import Axis
from shoal.record import NullRecorder, Recorder
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.timeline import Kind

Batch = TypeVar("Batch")


def own_rows(batch: Batch, plan: Plan, dp: Axis) -> Batch:
    """Return a rank's rows of a batch: in the order of ranks, with the Plan's `shares`.

    Args:
        batch: Tensors `[batch, ...]`, alone or in any nesting of dicts, lists, tuples and dataclasses. The
            first tensor of several rows says their number. Tensors without dims or with one row stay whole;
            arrays, and lists of other values, are cut if they have as many elements as the batch has rows.
        plan: The Plan.
        dp: The axis of data parallelism.

    Raises:
        PlanError: The batch does not divide, or the ranks would have to be padded.
        ModelError: It holds no tensor with rows, tensors with different numbers of rows, or an object of
            another kind that has tensors.
    """
    lengths = [len(tensor) for tensor in tensors_in(batch) if tensor.dim()]
    if not lengths:
        raise ModelError(
            f"local() was given a {type(batch).__name__} without a tensor that has rows",
            possible="a tensor [batch, ...], alone or in dicts, lists, tuples and dataclasses",
            change="give the batch as tensors",
        )
    count = next((length for length in lengths if length > 1), lengths[0])
    rows = _rows_of(count, plan, dp)
    cut: Batch = _cut(batch, count, rows)
    return cut


def _cut(value: Any, count: int, rows: slice) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or (len(value) == 1 and count > 1):
            return value
        if len(value) != count:
            raise ModelError(
                f"local() was given tensors of {count} and of {len(value)} rows in one batch",
                possible="tensors [batch, ...] with equally many rows, with one row, or without dims",
                change="cut the others by hand",
            )
        return value[rows]
    if isinstance(value, np.ndarray):
        return value[rows] if value.ndim and len(value) == count else value
    if isinstance(value, list | tuple) and len(value) == count and not any(map(_has_tensors, value)):
        return value[rows]
    refuse_hidden(value, "local")
    return map_children(partial(_cut, count=count, rows=rows), value)


def _has_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


def _rows_of(count: int, plan: Plan, dp: Axis) -> slice:
    """Return a rank's rows of a batch of so many.

    Raises:
        PlanError: The batch does not divide, or the ranks would have to be padded.
    """
    if (shares := plan.shared) is None:
        SettledPlan.of(Plan(dp=dp.size), count)  # raises
        size = count // dp.size
        return slice(dp.index * size, (dp.index + 1) * size)
    if plan.is_padded:
        raise PlanError(
            f"a batch was to be cut by the Plan {plan}, with which ranks need equally many micro-batches",
            possible="shoal.Trainer, which pads ranks; or shares with shard=none or zero1 and pp=1",
            change="use the Trainer, or leave out shares",
        )
    shares.require_batch(count, None)
    size = count // shares.total
    first = size * sum(shares.of_rank(rank) for rank in range(dp.index))
    return slice(first, first + size * shares.of_rank(dp.index))


def require_padded(plan: Plan, count: int) -> None:
    """Check that a rank makes as many micro-batches as the one with most, if the Plan pads ranks.

    Raises:
        PlanError: It makes another number.
    """
    most = plan.shared.most if plan.is_padded and plan.shared is not None else count
    if count != most:
        raise PlanError(
            f"{count} micro-batches were given under the Plan {plan}, with which each rank needs {most}",
            possible=f"{most} micro-batches on each rank, those beyond its own with a loss of zero",
            change="use the Trainer, which adds them, or leave out shares",
        )


def require_step(plan: Plan, count: int, loss: Any) -> None:
    """Check the number of a step's micro-batches, and that its loss is a function.

    Raises:
        PlanError: The Plan needs another number of micro-batches.
        ModelError: There are none, or the loss cannot be called.
    """
    if not callable(loss):
        raise ModelError(
            f"the loss {loss!r} cannot be called",
            possible="a function of the output and the targets, such as torch.nn.functional.mse_loss",
            change="give the function itself",
        )
    if count < 1:
        raise ModelError(
            f"a step of {count} micro-batches was asked for",
            possible="1 or more",
            change="leave the step out on all ranks, or give a larger count",
        )
    require_padded(plan, count)


def require_scalar(loss: Any) -> torch.Tensor:
    """Return a loss, checked to be one number with a gradient.

    Raises:
        ModelError: It is not.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    if not isinstance(loss, torch.Tensor):
        what = f"a {type(loss).__name__}"
    elif loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}"
    else:
        what = "a number without a gradient"
    raise ModelError(
        f"the loss is {what}",
        possible="a tensor with one number, the mean over a micro-batch, computed from the model's output",
        change="return loss.mean(), of the output as it is: not detached, nor within torch.no_grad()",
    )


def next_of(coming: Iterator[Batch], number: int) -> Batch:
    """Return micro-batch `number` of a step.

    Raises:
        ModelError: There is none.
    """
    for each in coming:
        return each
    raise ModelError(
        f"a step takes more micro-batches than the {number} that were given",
        possible="an iterator of `count` micro-batches on each rank",
        change="give more of them, or a smaller count",
    )


def run_one_by_one(
    forwards: Iterable[Callable[[], torch.Tensor]],
    count: int,
    accumulate: Callable[[], AbstractContextManager[None]],
    *,
    mean_of: float | None = None,
    recorder: Recorder | None = None,
    before_last: Callable[[torch.Tensor], object] = lambda total: None,
) -> torch.Tensor:
    """Run forward and backward of one micro-batch after another.

    Args:
        forwards: For each micro-batch, a function that runs its forward and returns its mean loss.
        count: Number of micro-batches to run.
        accumulate: Context for all backwards but the last: gradients are kept, to combine with the last
            one's.
        mean_of: Number of micro-batches over which losses and gradients are averaged; `count` by default.
            Ranks with other numbers of micro-batches average over the mean of these, so that the mean over
            ranks is the mean over all micro-batches.
        recorder: Recorder of spans.
        before_last: Called with what is returned, before the last backward; communication that it starts runs
            beside it.

    Returns:
        The sum of all losses over `mean_of`.
    """
    mean_of = count if mean_of is None else mean_of
    recorder = NullRecorder() if recorder is None else recorder
    total: torch.Tensor | None = None
    coming = iter(forwards)
    for number in range(count):
        is_last = number + 1 == count
        forward = next_of(coming, number)
        with recorder.span(Kind.FORWARD):
            loss = require_scalar(forward()) / mean_of
            del forward  # its batch is freed before backward
            total = loss.detach() if total is None else total + loss.detach()
        if is_last:
            before_last(total)
        with recorder.span(Kind.BACKWARD), nullcontext() if is_last else accumulate():
            loss.backward()
    assert total is not None
    return total


@final
class AuxiliaryLosses:
    """Scale the auxiliary losses of a model as its loop scales the mean loss of a forward.

    Args:
        model: The model.
        split: Number of ranks over which tensor parallelism splits the sequence: each adds its part of a sum.
    """

    def __init__(self, model: nn.Module, split: int) -> None:
        self._model = model
        self._split = split
        self._is_there = bool(mixtures_of(model))
        self._mean_of: float | None = None
        self._is_accumulating = False

    def divide_by(self, mean_of: float | None) -> None:
        """Divide them by this number; with None by what the loop divides `next_token_loss` by."""
        self._mean_of = mean_of
        if mean_of is not None:
            set_auxiliary_scale(self._model, 1 / (mean_of * self._split))

    def begin_micro_batch(self, *, counts: bool) -> None:
        """Set whether the losses of the next forward count, of those that are divided by a number."""
        if self._mean_of is not None:
            set_auxiliary_scale(self._model, counts / (self._mean_of * self._split))

    def run(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the model's output, which tells the loss to note its factor if nobody told the number."""
        if not self._is_there or self._mean_of is not None or not torch.is_grad_enabled():
            return self._model(*inputs, **named)
        factor = LossFactor(self._split, lambda: self._is_accumulating)
        set_auxiliary_scale(self._model, factor)
        return factor.put_on(self._model(*inputs, **named))

    @contextmanager
    def dividing_by(self, mean_of: float) -> Iterator[None]:
        """Divide them by this number within it."""
        before = self._mean_of
        self.divide_by(mean_of)
        try:
            yield
        finally:
            self.divide_by(before)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Take each backward within it for one of several."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one forward of a model.

    Attributes:
        by_place: Arguments by their place.
        named: Arguments by their names.
    """

    by_place: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Any, model: Callable[..., Any]) -> Arguments:
        """Return the arguments for a model's inputs.

        A mapping is passed by keywords if the model takes its names, and a tuple or a list as several
        arguments if the model takes so many. Anything else is one argument.

        Args:
            inputs: The inputs, or `Arguments`, which are returned as they are.
            model: The model's forward.
        """
        if isinstance(inputs, Arguments):
            return inputs
        takes = inspect.signature(model)
        if isinstance(inputs, Mapping) and _binds(takes, cls(named=inputs)):
            return cls(named=dict(inputs))
        if type(inputs) in (tuple, list) and _binds(takes, cls(tuple(inputs))):
            return cls(tuple(inputs))
        return cls((inputs,))

    def give(self, model: Callable[..., Any]) -> Any:
        """Return what the model returns for them."""
        return model(*self.by_place, **self.named)


def _binds(takes: inspect.Signature, arguments: Arguments) -> bool:
    try:
        takes.bind(*arguments.by_place, **arguments.named)
    except TypeError:
        return False
    return True


def kind_of(value: Any) -> Hashable:
    """Return the kind of a model's inputs: structure, shapes, types, and numbers and texts, except floats.

    Shapes within the model's forward follow from it.
    """
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if (held := children_of(value)) is not None:
        name = "mapping" if isinstance(value, Mapping) else type(value).__name__
        return name, tuple((key, kind_of(each)) for key, each in held.items())
    return value if value is None or isinstance(value, bool | int | str) else type(value).__name__
