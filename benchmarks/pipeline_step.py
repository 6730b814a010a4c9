"""One optimizer step through a pipeline of stages: what the contestants of `pipeline.py` do.

All train the same model from the same weights on the same micro-batches, with the same AdamW and the norm of
the whole gradient clipped to 1, in fp32. The stages of torch's pipelining have the pieces that Shoal's have.
Each rank's loss is scaled so that the mean over ranks is that of the step. Those of Shoal record all steps.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from contestants import ADAMW, CLIP, Task
from parallel_step import loop, timeline_file
from rounds import Step
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import shoal
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.models.transformer import FeedForward
from shoal.parallel.pipeline.pieces import cut_pieces
from shoal.record import SpanRecorder
from shoal.spec.plan import Plan
from shoal.spec.timeline import Kind

__all__ = [
    "MODELS",
    "SHAPE",
    "TORCH_SCHEDULES",
    "PipelineTask",
    "TorchStage",
    "alone",
    "micro_batches_of",
    "over_pipeline",
    "over_torch",
    "shoal_step",
    "torch_step",
]

TORCH_SCHEDULES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""The class of torch's pipelining that makes the same table as the schedule of that name."""

SHAPE = TransformerConfig(
    vocab_size=256, layers=8, hidden=256, heads=4, kv_heads=4, ffn=1024, seq=128, tie_embeddings=False
)
"""The even model's, for sequences of 128 tokens."""

_VOCABULARY = 32_768  # the head takes as much as eight blocks
_NARROWEST, _WIDEST = (
    0.5,
    4.0,
)  # of the feed-forward layers, over the hidden size (as OpenELM, arXiv:2404.14619)


def _large_vocabulary(shape: TransformerConfig) -> Transformer:
    return Transformer(shape.model_copy(update={"vocab_size": _VOCABULARY}))


def _widening(shape: TransformerConfig) -> Transformer:
    """Each block's feed-forward layer is wider than the one before, as in OpenELM."""
    model = Transformer(shape)
    for number, block in enumerate(model.blocks):
        width = _NARROWEST + (_WIDEST - _NARROWEST) * number / (len(model.blocks) - 1)
        ffn = round(width * shape.hidden / 32) * 32
        block.feed_forward = FeedForward(shape.model_copy(update={"ffn": ffn}))
    return model


MODELS: Mapping[str, Callable[[TransformerConfig], Transformer]] = {
    "even": Transformer,
    "large vocabulary": _large_vocabulary,
    "widening blocks": _widening,
}
"""What is trained, by name, of a shape whose head is not tied."""


@dataclass(frozen=True, slots=True)
class PipelineTask(Task):
    """A Task whose batch, that of one rank, is cut into micro-batches; `preset` is a name in `MODELS`.

    Attributes:
        micro_batches: Their number; it divides the batch.
        shape: What the model is made of; its context becomes the sequence.
    """

    micro_batches: int
    shape: TransformerConfig = SHAPE

    def empty_model(self) -> Transformer:
        """The model without values, on torch's current device."""
        return MODELS[self.preset](self.shape.model_copy(update={"seq": self.sequence}))

    def model(self) -> Transformer:
        """See `Task.model`."""
        model = self.empty_model()
        model.initialize(0)
        return model


def micro_batches_of(task: PipelineTask, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs that a batch `[batch, seq]` is cut into."""
    return zip(inputs.chunk(task.micro_batches), targets.chunk(task.micro_batches), strict=True)


def alone(task: PipelineTask, rank: int) -> Step:
    """One rank by itself, one micro-batch after another."""
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        for part, wanted in micro_batches_of(task, inputs, targets):
            loss = next_token_loss(model(part), wanted) / task.micro_batches
            loss.backward()
            total += loss.detach()
        return total

    def update() -> None:
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return loop(task.batches(0), gradients, update)


# -- Shoal ----------------------------------------------------------------------------------------------


def over_pipeline(plan: str, backend: str, task: PipelineTask, rank: int) -> Step:
    """A Plan's schedule, recorded.

    Args:
        plan: Its text form; `{ranks}` stands for their number.
        backend: Of the process group.
        task: What is trained; the timeline goes into its folder.
        rank: This one.
    """
    dist.init_process_group(backend)
    return shoal_step(plan, task, rank)


def shoal_step(plan: str, task: PipelineTask, rank: int) -> Step:
    """As `over_pipeline`, in a process group that is there."""
    ranks = dist.get_world_size()
    recorder = SpanRecorder(timeline_file(task, rank), rank)
    atexit.register(recorder.close)
    model = shoal.parallelize(task.model(), plan.format(ranks=ranks), recorder=recorder)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        pairs = micro_batches_of(task, inputs, targets)
        return model.forward_backward(pairs, task.micro_batches, next_token_loss) * ranks

    def update() -> None:
        with recorder.span(Kind.OPTIMIZER):
            model.clip_gradients(CLIP)
            optimizer.step()
            optimizer.zero_grad()

    step, indices = loop(task.batches(0), gradients, update), itertools.count()

    def recorded() -> float:
        with recorder.step(next(indices)):
            return step()

    return recorded


# -- torch ----------------------------------------------------------------------------------------------


class TorchStage(nn.Module):
    """Some pieces of a transformer as a module of their own, as users of torch's pipelining write it.

    Args:
        model: The whole, with a head of its own.
        pieces: 0 is the embedding, then come the blocks, then norm and head together.
    """

    def __init__(self, model: Transformer, pieces: range) -> None:
        super().__init__()
        is_last = len(model.blocks) + 1 in pieces
        self.embed = model.embed if 0 in pieces else None
        self.rotary = model.rotary
        self.blocks = nn.ModuleList(block for number, block in enumerate(model.blocks, 1) if number in pieces)
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps tokens `[batch, seq]` or hidden states to hidden states `[batch, seq, hidden]` or logits."""
        if self.embed is not None:
            hidden = self.embed(hidden)
        angles = self.rotary(hidden.shape[1], hidden.device)
        for block in self.blocks:
            hidden = block(hidden, angles)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def over_torch(plan: str, backend: str, task: PipelineTask, rank: int) -> Step:
    """The schedule of torch's pipelining whose table is that of a Plan, with the stages of the Plan.

    Args:
        plan: Its text form; `{ranks}` stands for their number.
        backend: Of the process group.
        task: What is trained.
        rank: This one.
    """
    dist.init_process_group(backend)
    return torch_step(plan, task, rank)


def torch_step(plan: str, task: PipelineTask, rank: int) -> Step:
    """As `over_torch`, in a process group that is there."""
    ranks = dist.get_world_size()
    laid = Plan.parse(plan.format(ranks=ranks))
    model = task.model()
    stages = [
        PipelineStage(TorchStage(model, pieces), index, laid.stages, torch.device("cpu"))
        for index, pieces in cut_pieces(model, laid).of(rank).items()
    ]
    # of `torch.distributed.pipelining`, but two that only its module `schedules` has
    kind = getattr(pipelining.schedules, TORCH_SCHEDULES[laid.schedule])
    own = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    schedule = kind(own, task.micro_batches, loss_fn=next_token_loss)
    is_first, is_last = stages[0].is_first, any(stage.is_last for stage in stages)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, **ADAMW)

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (inputs,) if is_first else ()
        schedule.step(*given, target=targets if is_last else None, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().mean() * ranks if is_last else torch.zeros(())

    return loop(task.batches(0), gradients, partial(_update, parameters, optimizer))


def _update(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = get_total_norm(gradients).square()
    dist.all_reduce(squares)
    clip_grads_with_norm_(parameters, CLIP, squares.sqrt())
    optimizer.step()
    optimizer.zero_grad()
