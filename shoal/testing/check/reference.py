"""Trains on one device, in the simplest code: the reference that every Plan is compared with.

It shares no code with `shoal.parallel` or the Trainer: the optimizer's weights, one loop, and a model in the
type that computes, whose gradients are summed in the type of the optimizer.

Measures on one device how far two trainings may differ if only their rounding differs.

The reference is one device that computes in the Plan's precision and sees each batch as one micro-batch. The
same training then runs in other ways that differ from it by rounding alone: in smaller micro-batches with the
samples rotated, so that every sum over samples has another order; from first weights that are moved by less
than half a unit in the last place; and in a type of twice the width. Rounding inside a matrix product, whose
sums a Plan splits, has the effect of such a move, and a layer may make the effect a hundred times as large.
Rounding explains deviations from the reference as large as theirs. A Plan may deviate `MULTIPLE` times as
much, since the other ways are few, plus `FLOOR` units in the last place.

A Task may compute something else if its samples come in other micro-batches, as batch normalization does.
Then every way sees the micro-batches that the Plan makes, and adds them in another order.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shoal.errors import ConfigError
from shoal.models import (
    SingleDevice,
    batch_normalizations,
    cast_module,
    logits_of,
    map_tensors,
    set_auxiliary_scale,
)
from shoal.models.dropout import token_keys
from shoal.models.loss import IGNORED
from shoal.testing.check.task_trial import AnyTrial, TaskTrial
from shoal.testing.check.trace import Forward, Trace
from shoal.testing.check.trial import CLIP, OPTIMIZER, Trial
from shoal.train.learning_rate import learning_rate
from shoal.train.micro_batch import auxiliary_coefficient

Tensors = dict[str, torch.Tensor]
"""Tensors by the parameter's name."""


@dataclass(frozen=True, slots=True)
class Step:
    """The results of one optimizer step.

    Attributes:
        losses: Loss of every token, before the step: `[batch, seq]`, in double precision on the CPU. For a
            Task: `[batch]`, for each sample the mean over its micro-batch.
        norm: Norm of the whole gradient, before clipping.
        gradients: Gradients by the parameter's name, before clipping; on the CPU.
        parameters: Parameters by name, after the step; on the CPU.
        buffers: Buffers of the first rank by name, after the step; on the CPU. None of them for one rank.
        evaluation: Mean loss of the first batch in evaluation, after the step; None if it is not comparable.
    """

    losses: torch.Tensor
    norm: float
    gradients: Tensors
    parameters: Tensors
    buffers: Tensors
    evaluation: float | None = None

    @property
    def loss(self) -> float:
        """Mean loss over the batch."""
        return float(self.losses.mean())


@dataclass(frozen=True, slots=True)
class Sums:
    """The order and the precision of one device's sums.

    Attributes:
        compute: Type of the weights that compute.
        master: Type of the optimizer's copy, and of the sums of gradients.
        microbatch: Samples in one forward.
        rotated: Number of positions by which the samples of a batch are rotated.
        moved: Whether the first weights are moved at random within half a unit in the last place.
        ranks: Ranks that the batch is divided over: a forward changes the buffers of its rank only.
    """

    compute: torch.dtype
    master: torch.dtype
    microbatch: int
    rotated: int = 0
    moved: bool = False
    ranks: int = 1


class Reference:
    """Trains a Trial on one device.

    Args:
        trial: The training to run.
        sums: The order and the precision of its sums.
        device: The device that it runs on.
    """

    def __init__(self, trial: AnyTrial, sums: Sums, device: torch.device) -> None:
        self._trial = trial
        self._sums = sums
        self._model: Any = trial.build_with_values(device)
        self._trained: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad
        }
        self._masters = {
            name: parameter.detach().to(sums.master, copy=True).requires_grad_()
            for name, parameter in self._trained.items()
        }
        if sums.moved:
            _move(self._masters.values())
        cast_module(self._model, sums.compute)
        choose_experts = getattr(self._model, "set_experts_implementation", None)
        if sums.compute == torch.float64 and callable(choose_experts):
            choose_experts("eager")  # grouped matrix products take no fp64
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        self._buffers = [copy.deepcopy(buffers) for _ in range(sums.ranks)] if sums.ranks > 1 else []
        self._losses: _TaskLosses | _TokenLosses
        if isinstance(trial, TaskTrial):
            self._losses = _TaskLosses(trial, self._model, sums, device)
        else:
            self._losses = _TokenLosses(trial, self._model, device)

    def run(self) -> list[Step]:
        """Run all steps from the first values, and return their results."""
        with _default_type(torch.promote_types(self._sums.compute, torch.float32)):
            return self._run()

    def _run(self) -> list[Step]:
        trial = self._trial
        masters = self._masters
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": [m for m in masters.values() if m.ndim >= 2],
                    "weight_decay": OPTIMIZER.weight_decay,
                },
                {"params": [m for m in masters.values() if m.ndim < 2], "weight_decay": 0.0},
            ],
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
        )
        steps = []
        for number in range(trial.steps):
            rate = learning_rate(OPTIMIZER, step=number, steps=trial.steps, batch=trial.batch)
            for group in optimizer.param_groups:
                group["lr"] = rate
            losses = self.backward(trial.batch_of(number))
            gradients = {name: _gradient_of(master) for name, master in masters.items()}
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), CLIP).item()
            optimizer.step()
            optimizer.zero_grad()
            parameters = {name: master.detach().cpu().clone() for name, master in masters.items()}
            evaluation = self._evaluation(number)
            first = self._buffers[0] if self._buffers else {}
            buffers = {name: buffer.cpu().clone() for name, buffer in first.items()}
            steps.append(Step(losses, norm, gradients, parameters, buffers, evaluation))
        return steps

    def _evaluation(self, number: int) -> float | None:
        """Return the mean loss in evaluation after step `number`; None if statistics of batches are used."""
        if batch_normalizations(self._model):
            return None
        self._give_weights()
        trial, size = self._trial, self._sums.microbatch
        held_out = trial.batch_of(number) if isinstance(trial, TaskTrial) else list(range(trial.batch))
        self._model.eval()
        with torch.no_grad():
            total = 0.0
            for start in range(0, len(held_out), size):
                with self._buffers_of(start):
                    total += float(self._losses(held_out[start : start + size]).double().sum())
        self._model.train()
        return total / self._losses.count(held_out)

    def _give_weights(self) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                self._trained[name].copy_(master)

    def backward(self, indices: Sequence[int]) -> torch.Tensor:
        """Compute the gradient of the mean loss over these samples, and store it at the masters.

        Returns:
            The losses of these samples, as in `Step`.
        """
        sums = self._sums
        self._give_weights()
        moved = [*indices[sums.rotated :], *indices[: sums.rotated]]
        micro = [moved[start : start + sums.microbatch] for start in range(0, len(moved), sums.microbatch)]
        told, count = [], self._losses.count(moved)
        for chosen in micro:
            set_auxiliary_scale(self._model, len(chosen) / len(moved))
            with self._buffers_of(indices.index(chosen[0])):
                losses = self._losses(chosen)
                (losses.sum() / count).backward()
            self._take_gradients()
            told.append(losses.detach().double().cpu())
        every = torch.cat(told).roll(sums.rotated, 0)
        return every * (every.numel() / count)

    @contextlib.contextmanager
    def _buffers_of(self, place: int) -> Iterator[None]:
        """Give the model the buffers of the rank that has the sample at a place in the batch."""
        if not self._buffers:
            yield
            return
        buffers = self._buffers[place * len(self._buffers) // self._trial.batch]
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            self._model.get_submodule(owner)._buffers[leaf] = buffer
        yield
        buffers.update(self._model.named_buffers(remove_duplicate=False))

    def _take_gradients(self) -> None:
        """Add the model's gradients to the masters' gradients."""
        for name, master in self._masters.items():
            gradient = self._trained[name].grad
            if gradient is not None:
                wide = gradient.to(master.dtype)
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                self._trained[name].grad = None

    def traced(self, indices: Sequence[int]) -> Forward:
        """Return the layers' outputs for these samples, in their order. Do not use the object after this."""
        trace = Trace(self._model)
        self.backward(indices)
        return trace.forwards[0]

    def gradients(self) -> Tensors:
        """Return the gradients that `backward` stored, on the CPU."""
        return {name: _gradient_of(master) for name, master in self._masters.items()}


class _TokenLosses:
    """Computes the losses of the tokens, `[batch, seq]`, from samples of a Trial; 0 without a target."""

    def __init__(self, trial: Trial, model: nn.Module, device: torch.device) -> None:
        self._trial = trial
        self._model = model
        self._device = device
        self._samples = trial.samples(model)
        dealt = itertools.chain.from_iterable(map(trial.batch_of, range(trial.steps)))
        self._places = {index: place for place, index in enumerate(dealt)}

    def count(self, indices: Sequence[int]) -> int:
        """Return how many tokens of these samples have a target."""
        _, targets = self._samples.batch(np.array(indices))
        return int((targets != IGNORED).sum())

    def __call__(self, chosen: Sequence[int]) -> torch.Tensor:
        """Run a forward of these samples, or of each of their documents, and return the losses."""
        inputs, targets = self._samples.batch(np.array(chosen))
        targets = targets.to(self._device)
        if self._trial.boundaries:
            return torch.stack([self._of_documents(*each) for each in zip(*inputs, targets, strict=True)])
        self._set_dropout(chosen, inputs.shape[1])
        return self._of(inputs.to(self._device), targets)

    def _of_documents(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Run each document of a sample alone, and return the losses of all, `[seq]`."""
        starts = [*(position_ids == 0).nonzero().flatten().tolist(), len(tokens)]
        parts = [
            self._of(tokens[None, start:end].to(self._device), targets[None, start:end])[0]
            for start, end in itertools.pairwise(starts)
        ]
        return torch.cat(parts)

    def _of(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        output = self._model(inputs)
        logits = logits_of(output)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = F.cross_entropy(
            logits.flatten(0, -2).to(wide), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        auxiliary = getattr(output, "aux_loss", None)
        if isinstance(auxiliary, torch.Tensor):
            coefficient = auxiliary_coefficient(self._model) or 0.0
            losses = losses + coefficient * auxiliary * (targets.flatten() != IGNORED)
        return losses.view(targets.shape)

    def _set_dropout(self, chosen: Sequence[int], sequence: int) -> None:
        """Give a model that takes dropout keys the masks that these samples have under every layout."""
        if hasattr(self._model, "dropout_keys"):
            places = torch.tensor([self._places[index] for index in chosen], device=self._device)
            positions = torch.arange(sequence, device=self._device)
            self._model.dropout_keys = token_keys(self._trial.seed, 0, places, positions)


class _TaskLosses:
    """Computes the mean loss of some samples of a Task, repeated for each of them, `[batch]`."""

    def __init__(self, trial: TaskTrial, model: nn.Module, sums: Sums, device: torch.device) -> None:
        self._trial = trial
        self._samples = trial.samples()
        self._model = SingleDevice(model, sums.compute)
        self._device = device
        self._type = torch.get_default_dtype()

    def count(self, indices: Sequence[int]) -> int:
        """Return the number of samples."""
        return len(indices)

    def __call__(self, chosen: Sequence[int]) -> torch.Tensor:
        """Run a forward of these samples and return the losses."""
        with _default_type(self._type):  # a Task may draw samples, and draws others in another type
            rows = self._samples.rows(chosen)
        part = map_tensors(lambda tensor: tensor.to(self._device), rows)
        self._trial.seed_forward(chosen)
        return self._samples.task.loss(self._model, part).expand(len(chosen))


@contextlib.contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    """Give this type to the tensors that a model makes of numbers, such as the smallest one of its type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def gradients_of(trial: AnyTrial, indices: Sequence[int], device: torch.device) -> Tensors:
    """Return the gradient of the mean loss over some samples, at the first values, in fp32."""
    reference = Reference(trial, Sums(torch.float32, torch.float32, max(1, len(indices))), device)
    reference.backward(indices)
    return reference.gradients()


def forward_of(trial: Trial, compute: torch.dtype, device: torch.device) -> Forward:
    """Return the layers' outputs for the batch of the first step, at the first values."""
    reference = Reference(
        trial, Sums(compute, torch.promote_types(compute, torch.float32), trial.batch), device
    )
    return reference.traced(trial.batch_of(0))


def _move(masters: Iterable[torch.Tensor]) -> None:
    """Move weights at random, within half a unit in the last place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for master in masters:
            units = (torch.rand(master.shape, generator=generator) - 0.5).to(master)
            master.addcmul_(master, units, value=torch.finfo(master.dtype).eps)


def _gradient_of(master: torch.Tensor) -> torch.Tensor:
    return (torch.zeros_like(master) if master.grad is None else master.grad).detach().cpu().clone()


MULTIPLE = 5.0
"""Factor on the other ways' deviation. Data-parallel Plans of 25 seeds, in fp32 and bf16, needed 1.5."""

FLOOR = 8.0
"""Units in the last place of fp32, the type of losses and of the optimizer's state."""

TYPES: Mapping[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float64),
    "bf16": (torch.bfloat16, torch.float32),
}
"""By a Plan's precision: the type of the compute, and a type of twice the width."""

_ULP = torch.finfo(torch.float32).eps


def require_precision(precision: str) -> None:
    """Refuse a Plan's precision that the reference does not have.

    Raises:
        ConfigError: There is no bound for it.
    """
    if precision not in TYPES:
        raise ConfigError(
            f"precision={precision} was given, and the reference on one device does not compute in it",
            possible=" or ".join(TYPES),
            change="check the layout in one of these",
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative deviations of one step that rounding explains.

    Attributes:
        loss: Bound for the loss.
        norm: Bound for the gradient's norm.
        gradients: Bound for each parameter's gradient.
        parameters: Bound for each parameter.
        buffers: Bound for each buffer of the first rank.
        evaluation: Bound for the loss in evaluation.
    """

    loss: float
    norm: float
    gradients: dict[str, float]
    parameters: dict[str, float]
    buffers: dict[str, float]
    evaluation: float


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The reference, and the bounds of deviations from it.

    Attributes:
        steps: Steps of the reference.
        bounds: Bounds for each step.
    """

    steps: list[Step]
    bounds: list[Bounds]

    @classmethod
    def measure(
        cls,
        trial: AnyTrial,
        precision: str,
        device: torch.device,
        microbatch: int | None = None,
        ranks: int = 1,
    ) -> Tolerance:
        """Train on one device, once as the reference and then in the other ways.

        Args:
            trial: The training to compare.
            precision: Precision of the Plans to compare: fp32 or bf16.
            device: The device that it runs on.
            microbatch: Samples of a micro-batch, if all ways are to see the same micro-batches.
            ranks: Ranks that the batch is divided over, if each is to have buffers of its own.
        """
        compute, wider = TYPES[precision]
        batch, single = trial.batch, torch.float32
        half = max(1, batch // 2)
        ways = [
            Sums(compute, single, 1, rotated=1 % batch),
            Sums(compute, single, half, rotated=half // 2),
        ]
        if microbatch is not None:
            # Of several ranks whole parts are rotated, so that each sees its micro-batches in their order.
            rotated = microbatch % batch if ranks == 1 else batch // ranks
            ways = [Sums(compute, single, microbatch, rotated=rotated, ranks=ranks)]
        size = microbatch or batch
        steps = Reference(trial, Sums(compute, single, size, ranks=ranks), device).run()
        ways += [Sums(compute, single, size, moved=True, ranks=ranks), Sums(wider, wider, size, ranks=ranks)]
        others = [Reference(trial, sums, device).run() for sums in ways]
        return cls(steps, [_bounds(step, alike) for step, *alike in zip(steps, *others, strict=True)])


def _bounds(step: Step, others: Sequence[Step]) -> Bounds:
    evaluated = [(other.evaluation, step.evaluation) for other in others]
    return Bounds(
        evaluation=bound_of(
            relative(one, two) if one is not None and two is not None else 0.0 for one, two in evaluated
        ),
        loss=bound_of(_loss_deviation(other, step) for other in others),
        norm=bound_of(relative(other.norm, step.norm) for other in others),
        gradients=_bounds_of_each(step.gradients, [other.gradients for other in others]),
        parameters=_bounds_of_each(step.parameters, [other.parameters for other in others]),
        buffers=_bounds_of_each(step.buffers, [other.buffers for other in others]),
    )


def _bounds_of_each(tensors: Tensors, others: Sequence[Tensors]) -> dict[str, float]:
    scales = scales_of(tensors)
    return {
        name: bound_of(vector_deviation(other[name], value, scales[name]) for other in others)
        for name, value in tensors.items()
    }


def _loss_deviation(other: Step, step: Step) -> float:
    """Return the loss's deviation, or that expected from independent deviations of tokens' losses if larger.

    A few means may agree by luck; the losses of many tokens cannot.
    """
    by_chance = float((other.losses - step.losses).norm()) / step.losses.numel()
    return max(relative(other.loss, step.loss), relative(step.loss + by_chance, step.loss))


def relative(value: float, reference: float) -> float:
    """Return the deviation of a number, as a share of the reference; infinite if it is not a number."""
    deviation = abs(value - reference) / max(abs(reference), torch.finfo(torch.float32).tiny)
    return deviation if deviation == deviation else float("inf")


def scales_of(tensors: Tensors) -> dict[str, float]:
    """Return the norm of each tensor, at least the last place of the norm of all tensors together."""
    norms = {name: float(value.double().norm()) for name, value in tensors.items()}
    least = _ULP * sum(norm**2 for norm in norms.values()) ** 0.5
    return {name: max(norm, least, torch.finfo(torch.float32).tiny) for name, norm in norms.items()}


def vector_deviation(value: torch.Tensor, reference: torch.Tensor, scale: float) -> float:
    """Return the norm of a difference, as a share of `scale`; infinite if an element is missing."""
    deviation = float((value.double() - reference.double()).norm()) / scale
    return deviation if deviation == deviation else float("inf")


def bound_of(deviations: Iterable[float]) -> float:
    """Return how far a Plan may deviate, from the deviations of the other ways."""
    return MULTIPLE * max(deviations) + FLOOR * _ULP
