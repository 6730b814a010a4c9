"""One optimizer step with a layer split over ranks: what the contestants of `parallel.py` have in common.

All train the same model from the same weights on the same batches, with the same AdamW and the gradient's
norm clipped to 1, in fp32. Those of Shoal record all their steps.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from contestants import ADAMW, CLIP, Task
from rounds import Step
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import shoal
from shoal.models import Transformer, next_token_loss, preset
from shoal.record import SpanRecorder
from shoal.spec.timeline import Kind

__all__ = ["Batches", "UntiedTask", "alone", "dealt", "loop", "over_shoal", "same_batches", "timeline_file"]

Batches = Iterator[tuple[Tensor, Tensor]]
"""Inputs and targets `[batch, seq]` of one rank, step after step."""


class UntiedTask(Task):
    """A Task whose model suits `parallelize_module`: an untied head, and no query heads that share a key.

    Its context is as long as the sequence, if the preset's is shorter.
    """

    def model(self) -> Transformer:
        """See `Task.model`."""
        shape = preset(self.preset)
        changes = {"tie_embeddings": False, "kv_heads": shape.heads, "seq": max(shape.seq, self.sequence)}
        model = Transformer(shape.model_copy(update=changes))
        model.initialize(0)
        return model


def same_batches(task: Task, rank: int) -> Batches:
    """The whole batch, on every rank."""
    return task.batches(0)


def dealt(task: Task, rank: int) -> Batches:
    """This rank's part of the batch."""
    ranks = dist.get_world_size()
    return replace(task, ranks=ranks, microbatch=task.batch // ranks).batches(rank)


def loop(
    batches: Batches, gradients: Callable[[Tensor, Tensor], Tensor], update: Callable[[], object]
) -> Step:
    """The step of a loop.

    Args:
        batches: Where it takes its data from.
        gradients: From inputs and targets to their loss, after its backward.
        update: What follows: clipping and the optimizer.
    """

    def step() -> float:
        loss = gradients(*next(batches))
        update()
        return loss.item()

    return step


def alone(task: Task, rank: int) -> Step:
    """One rank by itself."""
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    def update() -> None:
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return loop(task.batches(0), gradients, update)


def over_shoal(
    plan: str,
    task: Task,
    rank: int,
    *,
    backend: str = "shoal",
    batches: Callable[[Task, int], Batches] = same_batches,
) -> Step:
    """A Plan as its users apply it, recorded.

    Args:
        plan: Its text form; `{ranks}` stands for their number.
        task: What is trained; the timeline goes into its folder.
        rank: This one.
        backend: Of the process group.
        batches: What each rank gets.
    """
    dist.init_process_group(backend)
    recorder = SpanRecorder(timeline_file(task, rank), rank)
    atexit.register(recorder.close)
    model = shoal.parallelize(task.model(), plan.format(ranks=dist.get_world_size()), recorder=recorder)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        with recorder.span(Kind.FORWARD):
            inputs, targets = model.local_sequence(inputs), model.local_sequence(targets)
            loss = next_token_loss(model(inputs), targets)
        with recorder.span(Kind.BACKWARD):
            loss.backward()
        return loss.detach()

    def update() -> None:
        with recorder.span(Kind.OPTIMIZER):
            model.clip_gradients(CLIP)
            optimizer.step()
            optimizer.zero_grad()

    step = loop(batches(task, rank), gradients, update)
    return partial(_recorded, step, recorder, itertools.count())


def timeline_file(task: Task, rank: int) -> str:
    """Where a rank's spans go."""
    return str(task.folder / f"rank-{rank}.jsonl")


def _recorded(step: Step, recorder: SpanRecorder, indices: Iterator[int]) -> float:
    with recorder.step(next(indices)):
        return step()
