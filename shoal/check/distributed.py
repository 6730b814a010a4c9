"""The training of a Trial under a Plan, by the Trainer, and the parts that ranks hold put together."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from shoal.check.forward_recorder import ForwardRecorder
from shoal.check.trace import RankTrace, Trace
from shoal.check.trial import CLIP, OPTIMIZER, RandomTokens, Trial
from shoal.parallel import Axis, Owned, Parallel
from shoal.parallel.pipeline.stage_layout import parts_by_piece, stages_of
from shoal.plan import Plan
from shoal.record import Recorder
from shoal.train.trainer import Trainer

__all__ = [
    "Copy",
    "Fragment",
    "RankStep",
    "copies",
    "distinct",
    "fragment_of",
    "gradient_of",
    "groups_freed",
    "places",
    "trace_under",
    "train_under",
]


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one rank owns of a parameter, or of its gradient.

    Attributes:
        name: The parameter's name.
        shape: The whole parameter's shape.
        block: Dim, offset and length of the block of the parameter that this is of; None for all of it.
        start: First element in the flattened block.
        stop: Where the part ends.
        values: `[stop - start]`, fp32 on the CPU.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int, int] | None
    start: int
    stop: int
    values: torch.Tensor

    def __reduce__(self) -> Any:
        """As an array, which pickle takes at a tenth of the time of a tensor."""
        where = (self.name, self.shape, self.block, self.start, self.stop)
        return _unpickled, (where, self.values.numpy())

    @property
    def place(self) -> Hashable:
        """Equal where two fragments are of the same elements."""
        return self.name, self.block, self.start, self.stop


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank saw of an optimizer step.

    Attributes:
        loss: As the Trainer told it.
        norm: As well.
        samples: The samples that this rank trained on, in order.
        gradients: What it owns of the gradients, before clipping.
        parameters: What it owns of the parameters, after the step.
    """

    loss: float
    norm: float
    samples: list[int]
    gradients: list[Fragment]
    parameters: list[Fragment]


@dataclass(frozen=True, slots=True)
class Copy:
    """One whole tensor, put together from what ranks hold.

    Attributes:
        values: In the parameter's shape, double precision; NaN where no rank holds it.
        ranks: Those that hold a part of it.
        places: Rank by rank, where its parts lie in the flattened tensor.
    """

    values: torch.Tensor
    ranks: tuple[int, ...]
    places: Mapping[int, torch.Tensor]


def train_under(trial: Trial, plan: Plan, device: torch.device) -> list[RankStep]:
    """Trains as one rank of the default process group.

    Raises:
        PlanError: The Plan does not fit the ranks, the batch or the model.
        TrainingError: A loss or a norm is not finite.
    """
    with _distributed(trial, plan, device, trial.build_for_layout(device)) as (trainer, samples):
        return _steps(trainer, trial.batch, samples.asked)


def trace_under(trial: Trial, plan: Plan, device: torch.device) -> RankTrace:
    """Makes the first step anew, as one rank, and notes what the layers of the model give."""
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
    """The layers of this rank's stages, without what stands in the place of others.

    Layers in no part run on every stage, on what is not their input on one device.
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
    """Gives a Trainer of the model under the Plan, and its samples."""
    samples = trial.samples(model)
    trainer = Trainer(
        model,
        samples,
        plan,
        batch=trial.batch,
        steps=trial.steps,
        optimizer=OPTIMIZER,
        seed=trial.seed,
        device=device,
        recorder=recorder,
        sequence=trial.sequence,
    )
    with groups_freed(trainer.parallel):
        try:
            yield trainer, samples
        finally:
            trainer.close()


def _steps(trainer: Trainer, batch: int, asked: Sequence[Sequence[int]]) -> list[RankStep]:
    """All steps; `asked` grows meanwhile by the micro-batches that this rank trains on."""
    parallel = trainer.parallel
    clipped: list[torch.Tensor] = []

    def note(*_: Any) -> None:
        clipped[:] = [gradient_of(owned).detach().clone() for owned in parallel.owned]

    trainer.optimizer.register_step_pre_hook(note)
    accumulation = trainer.plan.microbatches_of(batch)
    steps = []
    for number in range(trainer.steps):
        result = trainer.step()
        factor = max(1.0, result.gradient_norm / CLIP)
        consumed = asked[number * accumulation : (number + 1) * accumulation]
        steps.append(
            RankStep(
                loss=result.loss,
                norm=result.gradient_norm,
                samples=[index for batch in consumed for index in batch],
                gradients=[
                    fragment_of(owned, gradient * factor)
                    for owned, gradient in zip(parallel.owned, clipped, strict=True)
                ],
                parameters=[fragment_of(owned, owned.local) for owned in parallel.owned],
            )
        )
    return steps


def copies(fragments: Iterable[tuple[int, Fragment]]) -> dict[str, list[Copy]]:
    """Puts whole tensors together: as many of each as there are ranks that hold the same element.

    Args:
        fragments: Of all ranks, each with its rank.
    """
    by_name: dict[str, list[tuple[int, Fragment]]] = {}
    for rank, fragment in fragments:
        by_name.setdefault(fragment.name, []).append((rank, fragment))
    return {name: list(_copies_of(held)) for name, held in by_name.items()}


def _copies_of(held: Sequence[tuple[int, Fragment]]) -> Iterator[Copy]:
    """Each copy takes, in the order of ranks, what does not overlap with what it has."""
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
    """The elements of the flattened parameter that a fragment holds, int64 `[stop - start]`."""
    if fragment.block is None:
        return torch.arange(fragment.start, fragment.stop)
    every = torch.arange(torch.Size(fragment.shape).numel()).view(fragment.shape)
    return every.narrow(*fragment.block).flatten()[fragment.start : fragment.stop]


def distinct(fragments: Iterable[tuple[int, Fragment]]) -> Iterator[tuple[int, Fragment]]:
    """Leaves out what is the same, bit by bit, as a fragment of the same elements before it."""
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
    """The values that this rank has of a parameter, or of its gradient."""
    block = None if owned.cut is None else (owned.cut.dim, owned.cut.offset, owned.cut.length)
    held = values.detach().flatten().cpu().clone()
    return Fragment(owned.name, tuple(owned.shape), block, owned.start, owned.stop, held)


def gradient_of(owned: Owned) -> torch.Tensor:
    """The gradient of what this rank owns; zero if there is none."""
    return torch.zeros_like(owned.local) if owned.gradient is None else owned.gradient


@contextmanager
def groups_freed(parallel: Parallel) -> Iterator[None]:
    """Within it the groups of the Plan's axes are there; after it only the default group is."""
    try:
        yield
    finally:
        groups = {axis.group for axis in _axes_in(parallel.axes) if axis.group is not None}
        for group in sorted(groups, key=lambda group: group.group_name):
            dist.destroy_process_group(group)


def _axes_in(value: Any) -> Iterator[Axis]:
    if isinstance(value, Axis):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _axes_in(getattr(value, field.name))
