"""Context parallelism by torch, and by hand: peers of Shoal's.

`context_parallel` is torch's documented way. On CPUs it does not run (torch 2.13): the kernel that attention
takes there is not among those that it replaces. So its ring stands here by itself, with that kernel: the two
functions that torch's own handlers call for the GPU's kernels. By hand, each rank gathers all keys and values
(Llama 3, arXiv:2407.21783, section 3.3.2). The sequence is cut alike in all of them, so that causal work is
even: `zigzag_positions` and torch's head-tail balancer are the same cut. Gradients are averaged by DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import ADAMW, CLIP, Task
from parallel_step import loop, same_batches
from rounds import Step
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as experimental
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from torch.nn.utils import clip_grad_norm_

from shoal.models import next_token_loss
from shoal.models.transformer import Attention, Rotary
from shoal.parallel.context.positions import zigzag_positions

__all__ = ["gathered_attention", "over_context_parallel", "over_gathered", "over_torch_ring", "torch_ring"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From this rank's query, key and value `[batch, heads, seq / ranks, head_dim]` to its part of the result."""

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def over_context_parallel(task: Task, rank: int) -> Step:
    """torch's `context_parallel`, as its tutorial has it."""
    model = _replicated(task)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    buffers: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Rotary):
            module.positions = lambda seq, device: buffers[2]

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        buffers[:] = inputs.clone(), targets.clone(), torch.arange(inputs.shape[1])
        with experimental.context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=set(buffers)
        ):
            loss = next_token_loss(model(buffers[0]), buffers[1])
            loss.backward()
        return loss.detach()

    return _trained(task, rank, model, gradients)


def over_torch_ring(rotate: str, task: Task, rank: int) -> Step:
    """torch's ring with the kernel for CPUs; `rotate` is "allgather", torch's default, or "alltoall"."""
    model = _replicated(task)
    rings.set_rotate_method(rotate)
    return _over_parts(task, rank, model, torch_ring)


def over_gathered(task: Task, rank: int) -> Step:
    """All keys and values on every rank."""
    return _over_parts(task, rank, _replicated(task), gathered_attention)


def torch_ring(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over the default group by torch's ring; see `Attend`."""
    result: Tensor = _TorchRing.apply(query, key, value)
    return result


def gathered_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over the default group, of each chunk to all keys up to its end; see `Attend`."""
    ranks, half = dist.get_world_size(), query.shape[2] // 2
    # By rank, then chunk: [2 * ranks, 2, batch, heads, half, head_dim].
    pair = torch.stack((key, value)).unflatten(3, (2, half)).movedim(3, 0).contiguous()
    chunks: Tensor = _Gather.apply(pair)
    order = [2 * i for i in range(ranks)] + [2 * i + 1 for i in reversed(range(ranks))]
    keys, values = chunks[order].movedim(0, 3).flatten(3, 4)
    results = []
    for chunk, rows in zip(
        (dist.get_rank(), 2 * ranks - 1 - dist.get_rank()), query.split(half, 2), strict=True
    ):
        end = (chunk + 1) * half
        seen = torch.ones(half, end, dtype=torch.bool).tril(end - half)
        results.append(
            F.scaled_dot_product_attention(rows, keys[:, :, :end], values[:, :, :end], seen, enable_gqa=True)
        )
    return torch.cat(results, 2)


class _Gather(torch.autograd.Function):
    """Every rank's tensor, joined along the first dim; backward adds the gradients up where they belong."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        whole = part.new_empty(dist.get_world_size() * len(part), *part.shape[1:])
        dist.all_gather_single(whole, part)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        part = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
        dist.reduce_scatter_single(part, gradient.contiguous())
        return part


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, logsumexp = rings._templated_ring_attention(
            dist.group.WORLD, 2, _KERNEL, query, key, value, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        return rings._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            _KERNEL_BACKWARD,
            gradient,
            "grad_out",
            query,
            key,
            value,
            output,
            logsumexp,
            is_causal=True,
            dropout_p=0.0,
        )


def _replicated(task: Task) -> nn.Module:
    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(task.model(), gradient_as_bucket_view=True)


def _over_parts(task: Task, rank: int, model: nn.Module, attend: Attend) -> Step:
    """A step whose model takes this rank's part of the sequence."""
    ranks = dist.get_world_size()
    here = zigzag_positions(task.sequence, ranks, rank)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attend
        if isinstance(module, Rotary):
            module.positions = lambda seq, device: here

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(inputs[:, here]), targets[:, here])
        loss.backward()
        return loss.detach()

    return _trained(task, rank, model, gradients)


def _trained(task: Task, rank: int, model: nn.Module, gradients: Callable[[Tensor, Tensor], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def update() -> None:
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return loop(same_batches(task, rank), gradients, update)
