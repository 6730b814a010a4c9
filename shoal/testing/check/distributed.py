"""Trains a Trial under a Plan with the Trainer, and assembles whole tensors from the parts on ranks."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from shoal.models import batch_normalizations
from shoal.parallel import Axis, Owned, Parallel
from shoal.parallel.pipeline.stage_layout import parts_by_piece, stages_of
from shoal.record import NullRecorder, OpenSpan, Recorder
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import Action
from shoal.spec.timeline import Kind
from shoal.testing.check.trace import RankTrace, Trace
from shoal.testing.check.trial import OPTIMIZER, RandomTokens, Trial
from shoal.train.micro_batch import TrainingData
from shoal.train.trainer import Runtime, Trainer


@final
class ForwardRecorder(Recorder):
    """Receives a Trainer's spans in one step, and knows which micro-batch's forward is running.

    In a pipeline the name of a forward's span is the schedule's action. Otherwise micro-batches come one
    after the other.

    Attributes:
        microbatch: Number of the micro-batch in the step; None outside of forwards.
    """

    def __init__(self) -> None:
        self.microbatch: int | None = None
        self._begun = 0
        self._nothing = NullRecorder()

    @contextmanager
    def span(self, kind: Kind, name: str = "", **fields: Any) -> Iterator[None]:
        """See `Recorder.span`."""
        if kind is not Kind.FORWARD:
            yield
            return
        self.microbatch = Action.parse(name).microbatch if name else self._begun
        self._begun += 1
        try:
            yield
        finally:
            self.microbatch = None

    def open(self, kind: Kind, name: str = "", **fields: Any) -> OpenSpan:
        """See `Recorder.open`."""
        return self._nothing.open(kind, name, **fields)

    def step(self, index: int) -> AbstractContextManager[None]:
        """See `Recorder.step`."""
        return self._nothing.step(index)

    def close(self) -> None:
        """See `Recorder.close`."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of a parameter, or of its gradient, that one rank owns.

    Attributes:
        name: The parameter's name.
        shape: The whole parameter's shape.
        block: Dim, offset and length of the block of the parameter that has this part; None for the whole
            parameter.
        start: First element of the part in the flattened block.
        stop: End of the part in the flattened block.
        values: `[stop - start]`, fp32 on the CPU.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int, int] | None
    start: int
    stop: int
    values: torch.Tensor

    def __reduce__(self) -> Any:
        """Pickle the values as an array, which takes a tenth of the time of a tensor."""
        where = (self.name, self.shape, self.block, self.start, self.stop)
        return _unpickled, (where, self.values.numpy())

    @property
    def place(self) -> Hashable:
        """A value that is equal for two fragments of the same elements."""
        return self.name, self.block, self.start, self.stop


@dataclass(frozen=True, slots=True)
class RankStep:
    """The results of an optimizer step on one rank.

    Attributes:
        loss: Loss that the Trainer reports.
        norm: Norm of the gradient that the Trainer reports.
        samples: The samples that this rank trained on, in order.
        gradients: The parts of the gradients that it owns, before clipping.
        parameters: The parts of the parameters that it owns, after the step.
        evaluation: Loss of the first batch in evaluation, after the step; None if it is not comparable.
        buffers: Buffers of the first rank after the step, if they are compared; on the CPU.
    """

    loss: float
    norm: float
    samples: list[int]
    gradients: list[Fragment]
    parameters: list[Fragment]
    evaluation: float | None = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Copy:
    """One whole tensor, assembled from the parts that ranks hold.

    Attributes:
        values: Values in the parameter's shape, in double precision; NaN where no rank holds an element.
        ranks: Ranks that hold a part.
        places: For each of these ranks, the positions of its parts in the flattened tensor.
    """

    values: torch.Tensor
    ranks: tuple[int, ...]
    places: Mapping[int, torch.Tensor]


def train_under(trial: Trial, plan: Plan, device: torch.device) -> list[RankStep]:
    """Train as one rank of the default process group.

    Raises:
        PlanError: The Plan does not fit the ranks, the batch or the model.
        TrainingError: A loss or a norm is not finite.
    """
    model = trial.build_for_layout(device)
    held_out = None if batch_normalizations(model) else trial.samples(model)
    with _distributed(trial, plan, device, model) as (trainer, samples):
        return _steps(trainer, trial.batch, samples.asked, held_out)


def trace_under(trial: Trial, plan: Plan, device: torch.device) -> RankTrace:
    """Repeat the first step, as one rank, and record the outputs of the model's layers."""
    forward_recorder = ForwardRecorder()
    model = trial.build_for_layout(device)
    pieces = parts_by_piece(model, stages_of(model)) if plan.pp > 1 else []
    parts = list(itertools.chain.from_iterable(pieces))
    whole = {name: type(module) for name, module in model.named_modules()}
    with _distributed(trial, plan, device, model, forward_recorder) as (trainer, samples):
        names = _comparable(trainer.parallel.module, whole, parts) if plan.pp > 1 else None
        trace = Trace(trainer.parallel.module, lambda: forward_recorder.microbatch, names)
        trainer.step()
        places = torch.arange(trial.sequence)[None]
        held = trainer.parallel.local_sequence(places)[0]
        blocks = [block for piece in pieces[1:-1] for block in piece]
        return RankTrace(samples.asked[: len(trace.forwards)], held, trace.forwards, blocks)


def _comparable(model: nn.Module, whole: Mapping[str, type], parts: Sequence[str]) -> set[str]:
    """Return the layers of this rank's stages, without the placeholders for those of other stages.

    Layers that belong to no part of the model are left out: they run on every stage, and their input there is
    not the one on one device.
    """
    return {
        name
        for name, module in model.named_modules()
        if type(module) is whole.get(name) and any(f"{name}.".startswith(f"{part}.") for part in parts)
    }


@contextmanager
def _distributed(
    trial: Trial,
    plan: Plan,
    device: torch.device,
    model: nn.Module,
    recorder: Recorder | None = None,
) -> Iterator[tuple[Trainer, RandomTokens]]:
    """Yield a Trainer of the model under the Plan, and its samples."""
    samples = trial.samples(model)
    trainer = Trainer(
        model,
        TrainingData(samples, sequence=trial.sequence),
        plan,
        batch=trial.batch,
        steps=trial.steps,
        optimizer=OPTIMIZER,
        seed=trial.seed,
        device=device,
        runtime=Runtime(recorder=recorder, offload_folder=tempfile.gettempdir()),
    )
    with groups_freed(trainer.parallel):
        try:
            yield trainer, samples
        finally:
            trainer.close()


def _steps(
    trainer: Trainer, batch: int, asked: Sequence[Sequence[int]], held_out: RandomTokens | None
) -> list[RankStep]:
    """Run all steps; each adds to `asked` the micro-batches that this rank trains on."""
    parallel = trainer.parallel
    gradients: list[torch.Tensor] = []

    def note(*_: Any) -> None:
        gradients[:] = [gradient_of(owned).detach().clone() for owned in parallel.owned]

    trainer.optimizer.register_step_pre_hook(note)
    shares = trainer.plan.shared
    own = trainer.plan.microbatches_of(batch) if shares is None else shares.of_rank(parallel.axes.dp.index)
    steps = []
    for number in range(trainer.steps):
        result = trainer.step()
        consumed = asked[number * own : (number + 1) * own]
        steps.append(
            RankStep(
                loss=result.loss,
                norm=result.gradient_norm,
                samples=[index for batch in consumed for index in batch],
                gradients=[
                    fragment_of(owned, gradient)
                    for owned, gradient in zip(parallel.owned, gradients, strict=True)
                ],
                parameters=[fragment_of(owned, owned.local) for owned in parallel.owned],
                evaluation=None if held_out is None else trainer.validate(held_out, batch),
            )
        )
    return steps


def copies(fragments: Iterable[tuple[int, Fragment]]) -> dict[str, list[Copy]]:
    """Assemble whole tensors: as many copies of each as there are ranks that hold the same element.

    Args:
        fragments: The fragments of all ranks, each with its rank.
    """
    by_name: dict[str, list[tuple[int, Fragment]]] = {}
    for rank, fragment in fragments:
        by_name.setdefault(fragment.name, []).append((rank, fragment))
    return {name: list(_copies_of(held)) for name, held in by_name.items()}


def _copies_of(held: Sequence[tuple[int, Fragment]]) -> Iterator[Copy]:
    """Yield copies; each takes, in the order of ranks, the fragments that do not overlap its others."""
    left = [(rank, fragment, places(fragment)) for rank, fragment in held if fragment.stop > fragment.start]
    while left:
        shape = left[0][1].shape
        values = torch.full((torch.Size(shape).numel(),), torch.nan, dtype=torch.float64)
        filled = torch.zeros(values.numel(), dtype=torch.bool)
        taken: dict[int, torch.Tensor] = {}
        others = []
        for rank, fragment, where in left:
            if filled[where].any():
                others.append((rank, fragment, where))
                continue
            filled[where] = True
            values[where] = fragment.values.double()
            taken[rank] = torch.cat([taken[rank], where]) if rank in taken else where
        yield Copy(values.view(shape), tuple(taken), taken)
        left = others


def places(fragment: Fragment) -> torch.Tensor:
    """Return the elements of the flattened parameter that a fragment holds, int64 `[stop - start]`."""
    if fragment.block is None:
        return torch.arange(fragment.start, fragment.stop)
    every = torch.arange(torch.Size(fragment.shape).numel()).view(fragment.shape)
    return every.narrow(*fragment.block).flatten()[fragment.start : fragment.stop]


def distinct(fragments: Iterable[tuple[int, Fragment]]) -> Iterator[tuple[int, Fragment]]:
    """Skip each fragment that is equal, bit by bit, to an earlier fragment of the same elements."""
    before: dict[Hashable, list[Fragment]] = {}
    for rank, fragment in fragments:
        others = before.setdefault(fragment.place, [])
        if not any(torch.equal(fragment.values, other.values) for other in others):
            others.append(fragment)
            yield rank, fragment


def _unpickled(where: tuple[Any, ...], values: NDArray[np.float32]) -> Fragment:
    name, shape, block, start, stop = where
    return Fragment(name, shape, block, start, stop, torch.from_numpy(values))


def fragment_of(owned: Owned, values: torch.Tensor) -> Fragment:
    """Return the fragment of a parameter, or of its gradient, with this rank's values."""
    block = None if owned.cut is None else (owned.cut.dim, owned.cut.offset, owned.cut.length)
    held = values.detach().flatten().cpu().clone()
    return Fragment(owned.name, tuple(owned.shape), block, owned.start, owned.stop, held)


def gradient_of(owned: Owned) -> torch.Tensor:
    """Return the gradient of the part that this rank owns; zero if there is none."""
    return torch.zeros_like(owned.local) if owned.gradient is None else owned.gradient


@contextmanager
def groups_freed(parallel: Parallel) -> Iterator[None]:
    """Destroy the groups of the Plan's axes at the end of the context; the default group stays."""
    try:
        yield
    finally:
        axes = list(_axes_in(parallel.axes))
        groups = {
            group for axis in axes for group in (axis.group, *axis.channels.values()) if group is not None
        }
        for group in sorted(groups, key=lambda group: group.group_name):
            dist.destroy_process_group(group)


def _axes_in(value: Any) -> Iterator[Axis]:
    if isinstance(value, Axis):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _axes_in(getattr(value, field.name))
