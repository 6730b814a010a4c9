"""Tensor parallelism as users of torch write it: `parallelize_module` over DTensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contestants import ADAMW, CLIP, Task
from parallel_step import loop
from rounds import Step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

__all__ = ["over_dtensor"]

_COLUMNS = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")

_Styles = dict[str, ParallelStyle]
"""By the name of a module."""


def over_dtensor(backend: str, styles: str, task: Task, rank: int) -> Step:
    """A model whose layers are split.

    Args:
        backend: Of the process group.
        styles: "plain", or "sequence" where the residual stream is split along the sequence.
        task: What is trained.
        rank: This one.
    """
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = task.model()
    outer, inner = {"plain": _plain, "sequence": _sequence}[styles]()
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "fused": False, "foreach": False})

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        return loss

    return loop(task.batches(0), gradients, partial(_update, model, optimizer))


def _plain() -> tuple[_Styles, _Styles]:
    """Styles of the model's own layers, and of each block's."""
    outer: _Styles = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    inner: _Styles = {name: ColwiseParallel() for name in _COLUMNS}
    return outer, inner | {"attention.output": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}


def _sequence() -> tuple[_Styles, _Styles]:
    outer: _Styles = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    entry = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    inner: _Styles = {name: ColwiseParallel() for name in _COLUMNS}
    inner |= {
        "attention_norm": SequenceParallel(),
        "feed_forward_norm": SequenceParallel(),
        "attention": entry,
        "feed_forward": entry,
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return outer, inner


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # `clip_grad_norm_` does not take plain tensors and DTensors at once.
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    kinds = [[each for each in gradients if isinstance(each, DTensor) == split] for split in (True, False)]
    norms: list[Any] = [get_total_norm(kind, foreach=False) for kind in kinds if kind]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
    scale = CLIP / torch.stack(whole).norm().item()
    if scale < 1.0:
        for gradient in gradients:
            gradient.mul_(scale)
    optimizer.step()
    optimizer.zero_grad()
